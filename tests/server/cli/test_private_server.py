"""The stages of a start that a command shows while it waits for its own server, and the log of that
server."""

import json
from typing import cast

import pytest

from config.loading.sources import load
from server.cli.http_client import HttpClient, HttpFailure, HttpResponse
from server.cli.private_server import PrivateServer, quiet


class StartingClient:
    """Client of a server that does not listen, starts, stops listening, and is ready."""

    def __init__(self) -> None:
        error = {"error": {"message": "The server is starting: launching the engine."}}
        starting = (503, json.dumps(error).encode())
        self._answers = iter([None, starting, None, (200, b"{}")])

    async def ask(self, method: str, path: str) -> HttpResponse:
        answer = next(self._answers)
        if answer is None:
            raise HttpFailure("no server")
        status, content = answer
        return HttpResponse(status, {}, content)


async def test_the_stages_of_a_start_are_shown_without_full_stop_while_the_server_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrivateServer, "exit_code", None)
    server = PrivateServer.__new__(PrivateServer)
    stages: list[str] = []

    await server.wait_ready(cast(HttpClient, StartingClient()), stages.append)

    assert stages == [
        "The server is starting: importing modules",
        "The server is starting: launching the engine",
        "",
    ]


@pytest.mark.parametrize(
    ("flags", "level"),
    [([], "error"), (["--log-level=info"], "info"), (["--log-level=debug"], "debug")],
)
def test_the_server_of_a_command_logs_only_errors_unless_a_level_is_set(
    flags: list[str], level: str
) -> None:
    assert quiet(load(["m", *flags], environ={})).log_level == level
