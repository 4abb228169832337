"""Server for a single command: on a Unix socket, in a process that ends with the command."""

import asyncio
import dataclasses
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from config.engine import EngineConfig
from config.errors import EngineDied, ReasonPrinted
from config.loading.sources import DEFAULT, Loaded
from config.progress import ProgressLines
from config.server import ServerConfig
from engine.client.launcher import ChildProcess, SocketDirectory, python_command
from server.cli.http_client import UNIX, HttpClient, HttpFailure

POLL_S = 0.1
STOP_S = 10.0
NOT_LISTENING = "The server is starting: importing modules"
"""Stage before the server answers."""
CLEAR_LINE = "\r\x1b[K"
WITH_REASON = (1, 2)
"""Exit statuses of a server that has printed the reason."""


class PrivateServerArgs(msgspec.Struct, frozen=True):
    """Arguments of the server process (entry point: server/cli/start.py)."""

    engine: EngineConfig
    server: ServerConfig


class PrivateServer:
    """Server process on a Unix socket for a command. The constructor starts it; after `wait_ready`
    it accepts requests at `url`."""

    def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        self._directory = SocketDirectory()
        path = str(Path(self._directory.path, "api.sock"))
        server = dataclasses.replace(
            server, uds=path, api_server_count=1, ssl_certfile="", ssl_keyfile="", root_path=""
        )
        self.url = f"{UNIX}{path}"
        self._child = ChildProcess(
            "the server",
            python_command("server.cli.start", "private server", (signal.SIGINT,)),
            PrivateServerArgs(engine, server),
            stop_signal=signal.SIGTERM,
        )

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while the server runs."""
        return self._child.poll()

    async def wait_ready(
        self, client: HttpClient, on_stage: Callable[[str], None] = lambda stage: None
    ) -> None:
        """Wait until the server is ready. `on_stage` is called with the current start-up stage, as
        `The server is starting: loading the weights`; empty if the server stops.
        Raises ReasonPrinted or EngineDied if the server exits."""
        has_answered = False
        while True:
            if self.exit_code is not None:
                if self.exit_code in WITH_REASON:
                    raise ReasonPrinted(self.exit_code)
                raise EngineDied(self._child.end.description)
            try:
                answer = await client.ask("GET", "/ready")
            except HttpFailure:
                # After an answer, the server has stopped and prints its reason.
                stage = "" if has_answered else NOT_LISTENING
            else:
                if answer.status == 200:
                    return
                has_answered, stage = True, _message(answer.content)
            on_stage(stage)
            await asyncio.sleep(POLL_S)

    async def show_until_ready(self, client: HttpClient) -> None:
        """Like `wait_ready`, and shows the stages on stderr: in a line of the terminal that is
        replaced, otherwise in a line every few seconds."""
        if sys.stderr.isatty():
            await self.wait_ready(client, _draw)
            _draw("")
        else:
            with ProgressLines(prefix="") as lines:
                await self.wait_ready(client, lambda stage: lines.show(lambda: stage))

    def close(self) -> None:
        """Stop the server and wait for its exit."""
        self._child.close(STOP_S)
        self._directory.close()


def quiet(loaded: Loaded) -> ServerConfig:
    """Server settings that log only errors, unless the user set a log level."""
    if loaded.sources["log-level"][1] != DEFAULT:
        return loaded.server
    return dataclasses.replace(loaded.server, log_level="error")


def _draw(stage: str) -> None:
    """Replace the last line of the terminal by `stage`."""
    print(f"{CLEAR_LINE}{stage}", end="", file=sys.stderr, flush=True)


def _message(content: bytes) -> str:
    try:
        body = msgspec.json.decode(content)
        return str(body["error"]["message"]).rstrip(".")
    except (msgspec.DecodeError, LookupError, TypeError):
        return ""
