"""The commands of `gaudiserve chat`, and its notes below an answer that was cut."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from config.errors import PromptTooLong
from server.cli import chat
from server.cli.chat import main, repeats, unknown_command


def test_an_unknown_command_is_refused_with_the_known_commands() -> None:
    said = "unknown command /foo; commands: /clear, /system TEXT, /help, /exit, /quit"

    assert unknown_command("/foo") == said


@pytest.mark.parametrize("text", ["/sytem be kind", "/systme", "/sistem you are x"])
def test_a_misspelled_command_is_answered_with_the_nearest(text: str) -> None:
    said = f"unknown command {text.split()[0]}; did you mean /system? commands: "

    assert unknown_command(text).startswith(said)


@pytest.mark.parametrize(
    "text",
    [
        "/system",
        "/system be kind",
        "/clear now",
        "",
        "hello",
        "/exit",
        "/quit",
        "/etc/x y",
        "/etc/x",
        "/tmp is full",
        "//foo",
        "a /foo",
    ],
)
def test_a_message_or_a_known_command_is_not_refused(text: str) -> None:
    assert unknown_command(text) == ""


TOO_LONG = PromptTooLong(99, None, 64).message


@contextmanager
def answering(
    choices: Iterator[dict[str, Any]], room: int | None, most_messages: int = 100
) -> Iterator[str]:
    """URL of a server that streams `choices`; `room`: tokens left in its context, None: its
    /tokenize does not exist. More than `most_messages` are refused as too long."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if len(body["messages"]) > most_messages:
                self.answer({"error": {"message": TOO_LONG}}, 400)
            elif self.path != "/tokenize":
                self.stream()
            elif room is None:
                self.send_error(404)
            else:
                self.answer({"count": 10, "max_model_len": 10 + room})

        def answer(self, body: dict[str, Any], status: int = 200) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def stream(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                for choice in choices:
                    self.wfile.write(b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode())
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                # The chat has ended the answer.
                return

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_an_answer_that_repeats_itself_is_ended_with_a_note(
    field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = repeat({"delta": {field: "and so on, "}})

    with answering(endless, None) as url:
        status = main([f"--base-url={url}", "--quick=hi"])

    shown = capsys.readouterr()
    assert status == 0
    assert shown.err == "(ended: the answer repeats itself)\n"
    assert len(shown.out) < 2 * chat.MIN_CHARACTERS


@pytest.mark.parametrize(
    ("reason", "room", "note"),
    [
        ("length", None, "(ended at 12 tokens: --max-tokens)\n"),
        ("length", 7, "(ended at 7 tokens: the context is full)\n"),
        ("stop", None, ""),
    ],
)
def test_an_answer_that_reached_the_limit_of_tokens_has_a_note(
    reason: str, room: int | None, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = [{"delta": {"content": "Well"}}, {"delta": {}, "finish_reason": reason}]

    with answering(iter(choices), room) as url:
        main([f"--base-url={url}", "--quick=hi", "--max-tokens=12"])

    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("Well\n", note)


@pytest.mark.parametrize(("most_messages", "hint"), [(1, True), (0, False)])
def test_only_a_conversation_that_became_too_long_is_answered_with_clear(
    most_messages: int,
    hint: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = iter(["hi", "go on", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))

    with answering(iter([{"delta": {"content": "Well"}}]), None, most_messages) as url:
        main([f"--base-url={url}"])

    shown = capsys.readouterr().err
    assert "Please shorten the prompt" in shown
    assert shown.endswith("; /clear forgets the conversation\n") is hint


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ha" * 200, True),
        ("ha" * 190, False),
        ("x" + "la femme, " * 40, True),
        ("\n".join(map(str, range(500))), False),
    ],
)
def test_repetition_is_the_same_text_again(text: str, found: bool) -> None:
    assert repeats(text) is found


def test_the_page_has_the_same_limits_of_a_repetition() -> None:
    source = Path(__file__).parents[3] / "server/page/repetition.js"

    limits = re.findall(r"(M[A-Z_]+) = (\d+)", source.read_text())

    assert {name: int(limit) for name, limit in limits} == {
        name: getattr(chat, name) for name in ("MAX_PERIOD", "MIN_REPEATS", "MIN_CHARACTERS")
    }
