"""The profiling routes: off by default, behind a key, errors in OpenAI's format."""

from typing import Any

from http_rig import TalkingClient, in_memory

from config.errors import UserError

KEY = {"authorization": "Bearer k"}


class Profiled(TalkingClient):
    """An engine that runs only one profile at a time."""

    is_running = False

    async def control(self, name: str, **arguments: Any) -> Any:
        assert name in ("start_profile", "stop_profile")
        wants = name == "start_profile"
        if wants == self.is_running:
            raise UserError("a profile is already running", code="profile_running")
        self.is_running = wants
        return "/cache/traces/trace-1.json"


async def test_without_the_flag_there_is_no_profile_route() -> None:
    async with in_memory(Profiled()) as rig:
        answer = await rig.http.post("/start_profile")
        described = (await rig.http.get("/openapi.json")).json()["paths"]

        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
        assert "/start_profile" not in described


async def test_a_profile_names_its_file_and_a_second_profile_is_refused() -> None:
    async with in_memory(Profiled(), enable_dev_endpoints=True, api_keys=("k",)) as rig:
        keyless = await rig.http.post("/start_profile")
        begun = await rig.http.post("/start_profile", headers=KEY)
        again = await rig.http.post("/start_profile", headers=KEY)
        ended = await rig.http.post("/stop_profile", headers=KEY)

        assert keyless.status_code == 401
        assert begun.json() == ended.json() == {"file": "/cache/traces/trace-1.json"}
        assert again.status_code == 400
        assert again.json()["error"] == {
            "message": "a profile is already running",
            "type": "invalid_request_error",
            "param": None,
            "code": "profile_running",
        }
