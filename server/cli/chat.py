"""`gaudiserve chat`: a conversation in the terminal."""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

from config.checkpoint.demo import NAMES
from config.errors import CommandFailed
from config.loading.parser import FlagParser
from config.loading.sources import DEFAULT, Loaded, load
from config.loading.values import nearest
from config.progress import ProgressLines
from server.cli.bench.openai import first_model
from server.cli.flags import command_parser
from server.cli.http_client import HttpClient, HttpFailure, add_base_url, key_for
from server.cli.private_server import PrivateServer
from server.cli.selftest import served

DESCRIPTION = """\
Chat in the terminal with MODEL, which is served here until you leave, or with the model of a
running server (--base-url). Ctrl-C stops an answer, Ctrl-D leaves; /clear forgets the conversation,
/system TEXT begins a new conversation with this system prompt, /help lists the commands.
"""
PATH = "/v1/chat/completions"
TOKENIZE_PATH = "/tokenize"
MAX_TOKENS = 1024
"""Default token limit of a reply, because small models may repeat themselves forever."""
DIM, NORMAL = "\x1b[2m", "\x1b[0m"
LEAVE = ("/exit", "/quit")
HELP = "/help"
NAMES_OF_COMMANDS = ("/clear", "/system", HELP, *LEAVE)
COMMANDS = ", ".join(("/clear", "/system TEXT", HELP, *LEAVE))
COMMAND = re.compile(r"/[a-z]+")
"""Form of a command's first word. A message can match too, such as a path /usr."""
CLEAR_LINE = "\r\x1b[K"


def chat_parser() -> FlagParser:
    """Parser with the flags of `serve` and the flags of the chat."""
    parser = command_parser("gaudiserve chat", DESCRIPTION)
    parser.examples = (
        "gaudiserve chat",
        "gaudiserve chat /data/model --system-prompt 'Answer in French.'",
        "gaudiserve chat --base-url http://localhost:8000 --quick 'Name three fruits.'",
    )
    group = parser.add_argument_group("Chat")
    add = group.add_argument
    add_base_url(group)
    add("--model-name", metavar="NAME", help="Name of the model [the first model of the server]")
    add("--system-prompt", metavar="TEXT", help="System prompt of the conversation")
    add(
        "--max-tokens",
        metavar="N",
        type=int,
        default=MAX_TOKENS,
        help=f"Maximum tokens of an answer, fewer if the context has less room [{MAX_TOKENS}]",
    )
    add("--quick", metavar="TEXT", help="Send this message, print the answer, and exit")
    return parser


def main(argv: list[str]) -> int:
    """Run the chat; returns 1 if the only message of --quick has failed, otherwise 0. Raises
    ConfigError, CommandFailed if the server cannot be reached, and the errors of
    PrivateServer.wait_ready."""
    loaded = load(argv, default_model=NAMES[0], parser=chat_parser())
    loop = asyncio.new_event_loop()
    server = None
    if loaded.arguments.base_url is None:
        loaded = served(loaded, loaded, chat_parser())
        server = PrivateServer(loaded.engine, _quiet(loaded))
    try:
        return _Terminal(loop, loaded, server).run()
    finally:
        loop.close()
        if server is not None:
            server.close()


def _quiet(loaded: Loaded) -> Any:
    """Server settings that log only errors, unless the user set a log level."""
    if loaded.sources["log-level"][1] != DEFAULT:
        return loaded.server
    return dataclasses.replace(loaded.server, log_level="error")


def unknown_command(text: str) -> str:
    """Error for a line that looks like a command but is unknown; empty for a known command and for
    a message. A line of several words counts as a command if its first word is similar to a known
    command."""
    word, _, rest = text.partition(" ")
    if word in NAMES_OF_COMMANDS or not COMMAND.fullmatch(word):
        return ""
    hint = nearest(word, NAMES_OF_COMMANDS)
    if rest and not hint:
        return ""
    return f"unknown command {word}{hint or ';'} commands: {COMMANDS}"


class _Terminal:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, loaded: Loaded, server: PrivateServer | None
    ) -> None:
        self._loop = loop
        self._arguments: argparse.Namespace = loaded.arguments
        self._server = server
        base_url = self._arguments.base_url
        url = base_url if server is None else server.url
        self._client = HttpClient(url, key_for(loaded.server.api_keys, base_url))
        self._model = self._arguments.model_name
        self._messages: list[dict[str, str]] = []
        self._is_terminal = sys.stdout.isatty()

    def run(self) -> int:
        try:
            self._loop.run_until_complete(self._open())
        except HttpFailure as error:
            raise CommandFailed(str(error)) from error
        self._begin(self._arguments.system_prompt)
        if self._arguments.quick is not None:
            return 0 if self._say(self._arguments.quick) else 1
        with contextlib.suppress(ImportError):
            # Line editing and history for input().
            __import__("readline")
        print(f"{self._model}: Ctrl-C stops an answer, Ctrl-D leaves, /help")
        while self._turn():
            pass
        return 0

    def _turn(self) -> bool:
        """Handle a user turn; returns False to quit."""
        try:
            return self._take(input("> ").strip())
        except (EOFError, KeyboardInterrupt) as end:
            print()
            return isinstance(end, KeyboardInterrupt)

    def _take(self, text: str) -> bool:
        """Handle a line; returns False to quit."""
        command, _, rest = text.partition(" ")
        if command == "/clear":
            self._begin(self._arguments.system_prompt)
            print("The conversation is forgotten.")
        elif command == "/system":
            self._begin(rest)
            state = "the system prompt was changed" if rest else "there is no system prompt"
            print(f"The conversation is forgotten; {state}.")
        elif command == HELP:
            print(f"Commands: {COMMANDS}. Ctrl-C stops an answer, Ctrl-D leaves.")
        elif refusal := unknown_command(text):
            print(refusal)
        elif text and command not in LEAVE:
            self._say(text)
        return command not in LEAVE

    async def _open(self) -> None:
        if self._server is not None:
            if sys.stderr.isatty():
                await self._server.wait_ready(self._client, _draw)
                _draw("")
            else:
                with ProgressLines(prefix="") as lines:
                    await self._server.wait_ready(
                        self._client, lambda stage: lines.show(lambda: stage)
                    )
        if self._model is None:
            self._model = await first_model(self._client)

    def _begin(self, system_prompt: str | None) -> None:
        self._messages = []
        if system_prompt:
            self._messages.append({"role": "system", "content": system_prompt})

    def _say(self, text: str) -> bool:
        """Print the reply as it arrives; returns False if the request failed."""
        self._messages.append({"role": "user", "content": text})
        answer: list[str] = []
        stop = asyncio.Event()
        # Not KeyboardInterrupt, which can be raised anywhere in the event loop.
        self._loop.add_signal_handler(signal.SIGINT, stop.set)
        try:
            self._loop.run_until_complete(self._print_until(stop, answer))
        except HttpFailure as error:
            self._messages.pop()
            if answer:
                print()
            print(f"gaudiserve: {error}", file=sys.stderr)
            return False
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)
        print()
        self._messages.append({"role": "assistant", "content": "".join(answer)})
        return True

    async def _print_until(self, stop: asyncio.Event, answer: list[str]) -> None:
        printing = asyncio.ensure_future(self._print_answer(answer))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((printing, stopping), return_when=asyncio.FIRST_COMPLETED)
        if printing.done():
            stopping.cancel()
            printing.result()
        else:
            printing.cancel()
            await asyncio.wait((printing,))

    async def _print_answer(self, answer: list[str]) -> None:
        body = {"model": self._model, "messages": self._messages}
        body |= {"stream": True, "max_tokens": await self._max_tokens(body)}
        thinks = False
        async for delta in self._deltas(body):
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            if bool(thought) != thinks and self._is_terminal:
                print(DIM if thought else NORMAL, end="")
            thinks = bool(thought)
            content = delta.get("content") or ""
            answer.append(content)
            print(thought or content, end="", flush=True)
        if thinks and self._is_terminal:
            print(NORMAL, end="")

    async def _max_tokens(self, body: dict[str, Any]) -> int:
        wanted: int = self._arguments.max_tokens
        try:
            counted = await self._client.call("POST", TOKENIZE_PATH, body)
            left = int(counted["max_model_len"]) - int(counted["count"])
        except (HttpFailure, KeyError, TypeError, ValueError):
            # Other servers may lack this route.
            return wanted
        # If no tokens are left, the server returns the error.
        return min(wanted, max(1, left))

    async def _deltas(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for data in self._client.events(PATH, body):
            event = json.loads(data)
            if error := event.get("error"):
                raise HttpFailure(str(error.get("message", error)))
            for choice in event["choices"]:
                yield choice["delta"]


def _draw(stage: str) -> None:
    """Replace the last line of the terminal by `stage`."""
    print(f"{CLEAR_LINE}{stage}", end="", file=sys.stderr, flush=True)
