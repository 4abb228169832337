"""The stages of a start that a command shows while it waits for its own server."""

import json
from typing import cast

import pytest

from server.cli.http_client import HttpClient, HttpFailure, HttpResponse
from server.cli.private_server import PrivateServer


class StartingClient:
    """Client of a server that first does not listen, then starts, then is ready."""

    def __init__(self) -> None:
        error = {"error": {"message": "The server is starting: launching the engine."}}
        self._answers = iter([(503, json.dumps(error).encode()), (200, b"{}")])
        self._has_listened = False

    async def ask(self, method: str, path: str) -> HttpResponse:
        if not self._has_listened:
            self._has_listened = True
            raise HttpFailure("no server")
        status, content = next(self._answers)
        return HttpResponse(status, {}, content)


async def test_the_stages_of_a_start_have_words_from_the_first_and_no_full_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrivateServer, "exit_code", None)
    server = PrivateServer.__new__(PrivateServer)
    stages: list[str] = []

    await server.wait_ready(cast(HttpClient, StartingClient()), stages.append)

    assert stages == [
        "The server is starting: importing modules",
        "The server is starting: launching the engine",
    ]
