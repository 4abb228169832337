"""Sleep, settings and prefix cache over HTTP: calls to the engine, and settings that are hidden."""

from typing import Any

import pytest
from http_rig import TalkingClient, in_memory

from config.engine import EngineConfig
from config.execution import ExecutionConfig
from engine.transport.messages import EngineStats

KEY = {"authorization": "Bearer k-secret"}
ASKED: dict[str, Any] = {"enable_dev_endpoints": True, "api_keys": ("k-secret",)}
QUESTION = {"messages": [{"role": "user", "content": "Hi"}]}


class Sleeper(TalkingClient):
    """An engine that falls asleep when it is called to, and is asleep at the next query of its
    state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def control(self, name: str, **arguments: Any) -> Any:
        self.calls.append((name, arguments))
        if name == "sleep":
            self.stats = EngineStats(sleep="falling_asleep")
        elif name == "sleep_state":
            self.stats = EngineStats(sleep="weights_offloaded")
        elif name == "wake_up":
            self.stats = EngineStats()
        return self.stats.sleep


async def test_a_sleeping_server_reports_its_state_and_serves_after_wake_up() -> None:
    engine = Sleeper()
    async with in_memory(engine, **ASKED) as rig:
        rig.http.headers.update(KEY)

        slept = await rig.http.post("/sleep?mode=wait&level=1")
        refused = await rig.http.post("/v1/chat/completions", json=QUESTION)
        ready = await rig.http.get("/ready")
        asleep = (await rig.http.get("/is_sleeping")).json()
        models = await rig.http.get("/v1/models")
        page = (await rig.http.get("/metrics")).text
        woken = await rig.http.post("/wake_up?tags=weights&tags=kv_cache")
        answered = await rig.http.post("/v1/chat/completions", json=QUESTION)

        assert (slept.status_code, woken.status_code, models.status_code) == (200, 200, 200)
        assert (refused.status_code, ready.status_code) == (503, 503)
        assert refused.headers["retry-after"] == ready.headers["retry-after"] == "10"
        assert "The model is asleep" in refused.json()["error"]["message"]
        assert asleep == {"is_sleeping": True}
        assert 'engine="0",model_name="demo",sleep_state="weights_offloaded"} 1.0' in page
        assert 'sleep_state="awake"} 0.0' in page
        assert answered.status_code == 200
        assert engine.calls == [
            ("sleep", {"level": 1, "mode": "wait"}),
            ("sleep_state", {}),
            ("wake_up", {"tags": ["weights", "kv_cache"]}),
        ]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?mode=keep", "mode"),
        ("/wake_up?tags=lora", "tags"),
        ("/reset_prefix_cache?reset_running_requests=true", "reset_running_requests"),
    ],
)
async def test_an_invalid_argument_is_refused_before_the_engine_is_called(
    path: str, param: str
) -> None:
    engine = Sleeper()
    async with in_memory(engine, **ASKED) as rig:
        answer = await rig.http.post(path, headers=KEY)

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert engine.calls == []


async def test_settings_are_shown_without_keys_paths_or_names() -> None:
    async with in_memory(Sleeper(), **ASKED, chat_template="/etc/secret.jinja") as rig:
        rig.state.engine_config = EngineConfig(
            "/models/secret",
            cache_dir="/cache/secret",
            execution=ExecutionConfig(profiler="secret.json"),
        )

        text = (await rig.http.get("/server_info", headers=KEY)).json()["vllm_config"]
        whole = await rig.http.get("/server_info?config_format=json", headers=KEY)

        told = whole.json()["vllm_config"]
        assert told["engine_config"]["scheduler"]["max_num_seqs"] == 32
        assert told["engine_config"]["device"] == "auto"
        assert told["engine"]["block_size"] == 16
        assert "max_num_seqs=32" in text
        assert "secret" not in text + whole.text


async def test_without_the_flag_load_is_served_and_development_routes_are_404() -> None:
    engine = TalkingClient()
    engine.stats = EngineStats(running=2, waiting=1)
    async with in_memory(engine) as rig:
        statuses = [
            (await rig.http.post(path)).status_code
            for path in ("/sleep", "/wake_up", "/reset_prefix_cache")
        ]
        told = await rig.http.get("/server_info")
        load = await rig.http.get("/load")

        assert (statuses, told.status_code) == ([404] * 3, 404)
        assert load.json() == {"server_load": 3}
