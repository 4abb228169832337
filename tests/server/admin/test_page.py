"""The page: complete public files, data only with a key, and no request texts in the data."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import socket
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest
from http_rig import TalkingClient, in_memory, on_port

from config.lora.info import LoRAInfo
from config.version import VERSION
from engine.client.state import Failure
from server.http.auth import PAGE_FILES
from server.text.chat_template import ChatTemplate

KEY = {"authorization": "Bearer k"}
ASKED = {"messages": [{"role": "user", "content": "a secret"}]}
FOLDER = Path(str(files("server") / "page"))
VENDOR = FOLDER / "vendor"
RECORD = json.loads((VENDOR / "packages.json").read_text())
OWN = sorted(path for path in FOLDER.iterdir() if path.is_file())
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
MAX_LINES = 250
"""Each file of the page should have a single purpose."""


async def test_the_page_answers_head_without_a_body() -> None:
    async with on_port() as rig:
        answer = await rig.http.head("/")

        assert (answer.status_code, answer.content) == (200, b"")


async def test_every_file_that_the_page_names_is_served_without_a_key() -> None:
    kinds = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
    async with in_memory(api_keys=("k",)) as rig:
        page = await rig.http.get("/")
        named = set(re.findall(r'(?:href|src)="(page/files/[^"]+)"', page.text))
        for script in SCRIPTS:
            imported = re.findall(r'from "\./([^"]+)"', script.read_text())
            named |= {f"page/files/{name}" for name in imported}

        assert page.headers["content-type"] == "text/html; charset=utf-8"
        # A file that no other file names would be dead code.
        served = {f"page/files/{path.name}" for path in OWN if path.suffix != ".html"}
        assert served | {f"page/files/{path.name}" for path in VENDOR.glob("*.js")} == named
        for path in named:
            file = await rig.http.get(f"/{path}")
            assert (file.status_code, file.headers["content-type"]) == (
                200,
                kinds[path.rpartition(".")[2]],
            )
            assert file.headers["x-content-type-options"] == "nosniff"


async def test_files_beside_the_page_and_data_below_its_prefix_are_not_served() -> None:
    async with in_memory(api_keys=("k",)) as rig:
        for path in ("..%2fstate", "%2e%2e/state", "state", "packages.json", "page.html"):
            assert (await rig.http.get(PAGE_FILES + path)).status_code in (401, 404), path


async def test_a_file_that_has_not_changed_is_not_sent_again() -> None:
    async with in_memory() as rig:
        first = await rig.http.get("/page/files/main.js")
        again = await rig.http.get(
            "/page/files/main.js", headers={"if-none-match": first.headers["etag"]}
        )

        assert (again.status_code, again.content) == (304, b"")
        assert first.headers["cache-control"] == "no-cache"


def open_files() -> list[str]:
    return [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]


async def test_clients_that_do_not_read_a_file_of_the_docs_hold_no_open_file() -> None:
    request = b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: a\r\n\r\n"
    async with on_port() as rig, contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            sock = stack.enter_context(socket.socket())
            # Less than the file, even with the buffer of the server's kernel.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", rig.port))
            await asyncio.get_running_loop().sock_sendall(sock, request)
            await asyncio.get_running_loop().sock_recv(sock, 100)

        assert not [path for path in open_files() if path.endswith("swagger-ui-bundle.js")]
        answer = await rig.http.get("/docs/swagger-ui-bundle.js")
        assert len(answer.content) == int(answer.headers["content-length"]) > 2**20


async def test_the_policy_of_the_page_allows_no_markup_from_strings() -> None:
    async with in_memory() as rig:
        policy = (await rig.http.get("/")).headers["content-security-policy"]

        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "require-trusted-types-for 'script'; trusted-types dompurify" in policy


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_file_of_the_page_makes_no_markup_and_loads_nothing_external(path: Path) -> None:
    text = path.read_text()

    assert not re.search(r"https?://", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", text)
    assert not re.search(r"\s(on\w+|style)=\"", text)
    assert len(text.splitlines()) <= MAX_LINES


def test_the_libraries_are_the_recorded_releases_with_their_licences() -> None:
    recorded = {}
    for package in RECORD.values():
        assert any("LICENSE" in name for name in package["files"])
        recorded |= {name: facts["sha256"] for name, facts in package["files"].items()}

    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.iterdir()
        if path.name != "packages.json"
    }

    assert found == recorded


def test_the_pictures_of_the_page_show_this_version() -> None:
    # The script that makes the pictures writes the line that they show: `make page-pictures`.
    docs = Path(__file__).parents[3] / "docs"
    shown = json.loads((docs / "page-pictures.json").read_text(encoding="utf-8"))["shown"]

    assert shown.split(" · ")[0] == f"gaudiserve {VERSION}"


def test_the_limits_of_the_page_are_documented() -> None:
    constants = {}
    for name in ("storage.js", "repetition.js"):
        text = (FOLDER / name).read_text()
        constants |= dict(re.findall(r"\b(MAX_\w+|MIN_\w+) = ([\d_]+)", text))
    numbers = {name: f"{int(value.replace('_', '')):,}" for name, value in constants.items()}
    docs = " ".join((Path(__file__).parents[3] / "docs" / "page.md").read_text().split())

    assert f"the last {numbers['MAX_CONVERSATIONS']}, and each" in docs
    assert f"up to {numbers['MAX_CHARACTERS']} characters" in docs
    assert f"over at least {numbers['MIN_CHARACTERS']} characters" in docs
    assert f"the same text of at most {numbers['MAX_PERIOD']} characters" in docs
    assert numbers["MIN_REPEATS"] == "4"


async def test_the_page_state_requires_the_key_and_contains_no_text() -> None:
    async with in_memory(TalkingClient("the answer"), api_keys=("k",)) as rig:
        asked = await rig.http.post("/v1/chat/completions", json=ASKED, headers=KEY)

        without_key = await rig.http.get("/page/state")
        told = await rig.http.get("/page/state", headers=KEY)

        assert (asked.status_code, without_key.status_code) == (200, 401)
        assert "secret" not in told.text and "the answer" not in told.text
        state = json.loads(told.text)
        assert (state["model"], state["status"]) == ("demo", "ready")
        assert (state["models"], state["num_names"]) == (["demo", "org/demo"], 2)
        assert 0 <= state["uptime_s"] < 600
        (recent,) = state["recent"]
        assert recent["route"] == "/v1/chat/completions" and recent["end"] == "stop"
        assert 0 <= recent["ttft_s"] <= recent["seconds"]
        assert recent["output_tokens"] == asked.json()["usage"]["completion_tokens"]


async def test_the_page_state_says_that_images_and_documentation_are_unavailable() -> None:
    async with in_memory(enable_docs=False) as rig:
        state = (await rig.http.get("/page/state")).json()
        page = (await rig.http.get("/")).text

        assert (state["takes_images"], state["has_docs"]) == (False, False)
        assert 'aria-label="Add pictures" hidden>' in page


@pytest.mark.parametrize(("source", "has_none"), [(None, True), ("{{ messages }}", False)])
async def test_the_page_state_says_that_the_model_has_no_chat_template(
    source: str | None, has_none: bool
) -> None:
    async with in_memory() as rig:
        rig.state.template = ChatTemplate(source, {})

        assert (await rig.http.get("/page/state")).json()["has_no_template"] is has_none

        rig.state.template.close()


async def test_the_page_state_lists_the_adapters() -> None:
    async with in_memory() as rig:
        rig.client.adapters["chess"] = LoRAInfo("chess", "/adapters/chess", "digest", 8, 1024)

        state = (await rig.http.get("/page/state")).json()
        assert state["models"][state["num_names"] :] == ["chess"]


async def test_the_page_state_has_the_reason_of_an_engine_restart_or_failure() -> None:
    async with in_memory(TalkingClient("a")) as rig:
        rig.client.lost = Failure("the engine process was killed by SIGKILL")
        restarting = (await rig.http.get("/page/state")).json()
        rig.client.lost = None
        rig.client.failure = "out of memory"
        failed = (await rig.http.get("/page/state")).json()

        assert restarting["status"] == "restarting"
        assert restarting["reason"] == "the engine process was killed by SIGKILL"
        assert (failed["status"], failed["reason"]) == ("failed", "out of memory")


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
            for path in ("/", "/page/state", "/page/files/main.js", "/page/files/base.css")
        ]

        assert statuses == [404] * 4


async def test_the_notice_of_an_emulated_card_is_hidden_on_other_devices() -> None:
    async with in_memory() as rig:
        ready = rig.client.ready
        assert ready is not None
        rig.client.ready = msgspec.structs.replace(ready, device="hpu-emulator")

        state = (await rig.http.get("/page/state")).json()
        page = (await rig.http.get("/")).text
        script = (await rig.http.get("/page/files/main.js")).text

        assert '<p id="emulated" class="notice" hidden>There is no Gaudi' in page
        assert f'byId("emulated").hidden = facts?.device !== "{state["device"]}";' in script
