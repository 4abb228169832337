"""Private names of uvicorn that server/http/protocol.py and server/process/api_server.py use. A
release without one of these names would break all requests, so pyproject.toml bounds the supported
releases."""

import asyncio
import re
from importlib.metadata import version
from pathlib import Path

import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

ROOT = Path(__file__).resolve().parents[3]

PROTOCOL_NAMES = [
    "_unset_keepalive_if_required",
    "connection_lost",
    "connection_made",
    "data_received",
    "eof_received",
    "on_body",
    "on_header",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_response_complete",
    "on_url",
    "send_400_response",
    "shutdown",
    "client",
    "connections",
    "cycle",
    "expect_100_continue",
    "flow",
    "headers",
    "loop",
    "parser",
    "pipeline",
    "scope",
    "server_state",
    "timeout_keep_alive",
    "transport",
    "url",
]
CYCLE_NAMES = [
    "chunked_encoding",
    "disconnected",
    "expected_content_length",
    "keep_alive",
    "message_event",
    "response_complete",
    "response_started",
    "scope",
    "send",
    "transport",
    "waiting_for_100_continue",
]


async def _request_cycle() -> RequestResponseCycle:
    """The request cycle of a request on a connection."""
    has_arrived = asyncio.Event()

    async def app(scope: object, receive: object, send: object) -> None:
        has_arrived.set()
        await asyncio.sleep(60)

    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
    config.load()
    loop = asyncio.get_running_loop()
    protocol = HttpToolsProtocol(config, ServerState(), {}, loop)
    server = await loop.create_server(lambda: protocol, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    await asyncio.wait_for(has_arrived.wait(), 60)

    missing = [name for name in PROTOCOL_NAMES if not hasattr(protocol, name)]
    assert not missing, f"HttpToolsProtocol of uvicorn {uvicorn.__version__} lacks {missing}"
    assert isinstance(protocol.flow, FlowControl)
    assert protocol.connections is protocol.server_state.connections
    for task in protocol.server_state.tasks:
        task.cancel()
    writer.close()
    server.close()
    return protocol.cycle


def test_the_names_that_the_protocol_uses_exist() -> None:
    cycle = asyncio.run(_request_cycle())

    missing = [name for name in CYCLE_NAMES if not hasattr(cycle, name)]

    assert not missing, f"RequestResponseCycle of uvicorn {uvicorn.__version__} lacks {missing}"
    assert isinstance(cycle.message_event, asyncio.Event)
    assert httptools_impl.STATUS_LINE[404] == b"HTTP/1.1 404 Not Found\r\n"
    assert hasattr(FlowControl, "resume_reading") and hasattr(ServerState(), "default_headers")
    assert callable(uvicorn.Server.capture_signals) and callable(uvicorn.Server.on_tick)


def test_the_releases_of_uvicorn_are_bounded_and_include_the_installed_release() -> None:
    found = re.search(r'^ +"(uvicorn\b.*)",$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found is not None
    specifier = Requirement(found[1]).specifier

    operators = {each.operator for each in specifier}
    assert operators == {">=", "<"}
    assert specifier.contains(version("uvicorn"))
