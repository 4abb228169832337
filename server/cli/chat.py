"""`gaudiserve chat`: a conversation in the terminal."""

import argparse
import asyncio
import contextlib
import json
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing

from config.checkpoint.demo import NAMES
from config.errors import CommandFailed
from config.json_text import Json
from config.loading.parser import FlagParser
from config.loading.sources import Loaded, load
from config.loading.values import nearest
from server.cli.bench.openai import first_model
from server.cli.flags import command_parser, refuse_address, refuse_settings
from server.cli.http_client import HttpClient, HttpFailure, add_base_url, key_for
from server.cli.private_server import PrivateServer, quiet
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
MAX_PERIOD, MIN_REPEATS, MIN_CHARACTERS = 400, 4, 400
CONTEXT_LENGTH = "maximum context length"
"""Words in the error of a prompt that is too long, here and in vLLM."""
DIM, NORMAL = "\x1b[2m", "\x1b[0m"
LEAVE = ("/exit", "/quit")
HELP = "/help"
NAMES_OF_COMMANDS = ("/clear", "/system", HELP, *LEAVE)
COMMANDS = ", ".join(("/clear", "/system TEXT", HELP, *LEAVE))
COMMAND = re.compile(r"/[a-z]+")
"""Form of a command's first word. A message can match too, such as a path /usr."""


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
    """Run the chat; returns 1 if the message of --quick has failed, otherwise 0. Raises
    ConfigError, CommandFailed if the server's models cannot be read, and the errors of
    PrivateServer.wait_ready."""
    loaded = load(argv, default_model=NAMES[0], parser=chat_parser())
    loop = asyncio.new_event_loop()
    server = None
    try:
        if loaded.arguments.base_url is None:
            refuse_address(loaded)
            loaded = served(loaded, loaded, chat_parser())
            server = PrivateServer(loaded.engine, quiet(loaded))
        else:
            refuse_settings(loaded, "--model-name selects a model of the running server")
        return _Terminal(loop, loaded, server).run()
    finally:
        loop.close()
        if server is not None:
            server.close()


def repeats(text: str) -> bool:
    """Whether the end of `text` repeats at most MAX_PERIOD characters, at least MIN_REPEATS times
    and over at least MIN_CHARACTERS. The page has the same rule (server/page/repetition.js)."""
    for period in range(1, MAX_PERIOD + 1):
        length = max(MIN_CHARACTERS, MIN_REPEATS * period)
        if length > len(text):
            return False
        if text[-length + period :] == text[-length:-period]:
            return True
    return False


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
            await self._server.show_until_ready(self._client)
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
        # A KeyboardInterrupt could be raised anywhere in the event loop.
        self._loop.add_signal_handler(signal.SIGINT, stop.set)
        try:
            cut = self._loop.run_until_complete(self._print_until(stop, answer))
        except HttpFailure as error:
            self._messages.pop()
            if answer:
                print()
            print(f"gaudiserve: {error}{self._remedy(str(error))}", file=sys.stderr)
            return False
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)
        print()
        if cut:
            print(f"({cut})", file=sys.stderr)
        self._messages.append({"role": "assistant", "content": "".join(answer)})
        return True

    def _remedy(self, problem: str) -> str:
        """A hint for a conversation that is too long, otherwise empty."""
        # The system prompt alone is no conversation.
        is_long = CONTEXT_LENGTH in problem and len(self._messages) > 1
        return "; /clear forgets the conversation" if is_long else ""

    async def _print_until(self, stop: asyncio.Event, answer: list[str]) -> str:
        """Like `_print_answer`, until `stop` is set."""
        printing = asyncio.ensure_future(self._print_answer(answer))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((printing, stopping), return_when=asyncio.FIRST_COMPLETED)
        if printing.done():
            stopping.cancel()
            return printing.result()
        printing.cancel()
        await asyncio.wait((printing,))
        return ""

    async def _print_answer(self, answer: list[str]) -> str:
        """Print the answer as it arrives; returns why it was cut, empty for a complete answer."""
        body = {"model": self._model, "messages": self._messages}
        max_tokens = await self._max_tokens(body)
        body |= {"stream": True, "max_tokens": max_tokens}
        thinks, cut = False, ""
        # The end of the answer or of the thoughts, whichever is printed.
        tail = ""
        async with aclosing(self._choices(body)) as choices:
            async for choice in choices:
                delta = choice["delta"]
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                if bool(thought) != thinks:
                    tail = ""
                    if self._is_terminal:
                        print(DIM if thought else NORMAL, end="")
                thinks = bool(thought)
                content = delta.get("content") or ""
                answer.append(content)
                print(thought or content, end="", flush=True)
                tail = (tail + (thought or content))[-MIN_REPEATS * MAX_PERIOD :]
                if choice.get("finish_reason") == "length":
                    is_flag = max_tokens == self._arguments.max_tokens
                    limit = "--max-tokens" if is_flag else "the context is full"
                    cut = f"ended at {max_tokens} tokens: {limit}"
                elif repeats(tail):
                    cut = "ended: the answer repeats itself"
                    break
        if thinks and self._is_terminal:
            print(NORMAL, end="")
        return cut

    async def _max_tokens(self, body: Json) -> int:
        wanted: int = self._arguments.max_tokens
        try:
            counted = await self._client.call("POST", TOKENIZE_PATH, body)
            left = int(counted["max_model_len"]) - int(counted["count"])
        except (HttpFailure, KeyError, TypeError, ValueError):
            # Other servers may lack this route.
            return wanted
        # If no tokens are left, the server returns the error.
        return min(wanted, max(1, left))

    async def _choices(self, body: Json) -> AsyncGenerator[Json, None]:
        # Closed at once if the caller stops early, so that the server stops as well.
        async with aclosing(self._client.events(PATH, body)) as events:
            async for data in events:
                event = json.loads(data)
                if error := event.get("error"):
                    raise HttpFailure(str(error.get("message", error)))
                for choice in event["choices"]:
                    yield choice
