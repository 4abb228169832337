"""The status page: public files, data only with a key, and no request texts in it."""

import json

import msgspec
from http_rig import TalkingClient, in_memory, on_port

KEY = {"authorization": "Bearer k"}
ASKED = {"messages": [{"role": "user", "content": "a secret"}]}


async def test_the_page_answers_head_without_a_body() -> None:
    async with on_port() as rig:
        answer = await rig.http.head("/")

        assert (answer.status_code, answer.content) == (200, b"")


async def test_the_page_is_whole_and_takes_nothing_from_elsewhere() -> None:
    async with in_memory(api_keys=("k",)) as rig:
        page = await rig.http.get("/")
        style = await rig.http.get("/page/page.css")
        script = await rig.http.get("/page/page.js")

        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert style.headers["content-type"] == "text/css; charset=utf-8"
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        for text in (page.text, style.text, script.text):
            assert "http://" not in text and "https://" not in text


async def test_the_figures_need_the_key_and_hold_no_text() -> None:
    async with in_memory(TalkingClient("the answer"), api_keys=("k",)) as rig:
        asked = await rig.http.post("/v1/chat/completions", json=ASKED, headers=KEY)

        stranger = await rig.http.get("/page/state")
        told = await rig.http.get("/page/state", headers=KEY)

        assert (asked.status_code, stranger.status_code) == (200, 401)
        assert "secret" not in told.text and "the answer" not in told.text
        state = json.loads(told.text)
        assert (state["model"], state["status"]) == ("demo", "ready")
        (recent,) = state["recent"]
        assert recent["route"] == "/v1/chat/completions" and recent["end"] == "stop"
        assert 0 <= recent["ttft_s"] <= recent["seconds"]
        assert recent["output_tokens"] == asked.json()["usage"]["completion_tokens"]


async def test_the_page_offers_pictures_only_if_the_model_takes_them() -> None:
    async with in_memory() as rig:
        state = (await rig.http.get("/page/state")).json()
        page = (await rig.http.get("/")).text

        assert state["takes_images"] is False
        assert 'aria-label="Add pictures" hidden>' in page


async def test_recent_requests_are_bounded() -> None:
    async with in_memory(TalkingClient("a")) as rig:
        for _ in range(105):
            await rig.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})

        recent = (await rig.http.get("/page/state")).json()["recent"]

        assert len(recent) == 100


async def test_a_server_without_the_page_has_none_of_its_routes() -> None:
    async with in_memory(enable_page=False) as rig:
        statuses = [
            (await rig.http.get(path)).status_code
            for path in ("/", "/page/state", "/page/page.js", "/page/page.css")
        ]

        assert statuses == [404] * 4


async def test_the_page_has_a_notice_for_an_emulated_card_that_is_hidden_until_it_knows() -> None:
    async with in_memory() as rig:
        ready = rig.client.ready
        assert ready is not None
        rig.client.ready = msgspec.structs.replace(ready, device="hpu-emulator")

        state = (await rig.http.get("/page/state")).json()
        page = (await rig.http.get("/")).text
        script = (await rig.http.get("/page/page.js")).text

        assert '<p id="emulated" class="card notice" hidden>There is no Gaudi' in page
        assert f'byId("emulated").hidden = state.device !== "{state["device"]}";' in script
