"""`gaudiserve run-batch` and `gaudiserve chat`, as processes."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import ROOT, LiveServer, alive, children_of, running
from waits import WAIT_S

COMMAND = [sys.executable, "-m", "gaudiserve"]
FLAGS = ("--served-model-name=tiny", "--dtype=float32", "--max-num-seqs=4", "--max-model-len=256")


def write_batch(file: Path, count: int, max_tokens: int = 40) -> None:
    body = {"prompt": "hi", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i in range(count)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def batch(folder: Path, *flags: str) -> list[str]:
    return [*COMMAND, "run-batch", "-i", f"{folder}/in", "-o", f"{folder}/out", *flags]


@pytest.mark.slow
def test_a_batch_that_is_killed_twice_answers_each_line_once(
    tiny_model: str, tmp_path: Path
) -> None:
    write_batch(tmp_path / "in", 199)
    with (tmp_path / "in").open("a") as file:
        file.write('{"custom_id": "last", "url": "/v1/completions", "body": {"n": -1}}\n')
    command = batch(tmp_path, tiny_model, *FLAGS, "--max-concurrent-requests=8")
    out = tmp_path / "out"
    for at_least in (30, 90):
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        end_s = time.monotonic() + 60
        while not out.exists() or out.read_bytes().count(b"\n") < at_least:
            assert process.poll() is None and time.monotonic() < end_s
            time.sleep(0.01)
        family = children_of(process.pid)
        process.kill()
        process.wait()
        assert out.read_bytes().count(b"\n") < 200
        # No process is left that could answer a request and write its line.
        while any(map(alive, family)):
            assert time.monotonic() < end_s
            time.sleep(0.05)

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert "are already answered" in done.stderr
    assert done.stdout == "200 lines answered, 1 of them with an error\n"
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(
        ["last", *(f"r{i}" for i in range(199))]
    )
    by_id = {answer["custom_id"]: answer["response"] for answer in answers}
    assert by_id.pop("last")["status_code"] == 400
    assert {item["body"]["choices"][0]["text"] for item in by_id.values()} == {
        by_id["r0"]["body"]["choices"][0]["text"]
    }
    assert {item["body"]["usage"]["completion_tokens"] for item in by_id.values()} == {40}


def test_a_batch_uses_a_running_server_and_reports_a_missing_server(
    server: LiveServer, tmp_path: Path
) -> None:
    write_batch(tmp_path / "in", 3, max_tokens=2)
    done = subprocess.run(
        batch(tmp_path, f"--base-url={server.url}"),
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").read_text().count('"status_code":200') == 3

    (tmp_path / "out").unlink()
    done = subprocess.run(
        batch(tmp_path, "--base-url=http://127.0.0.1:1"),
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60},
    )
    assert done.returncode == 1
    assert "no server answers at http://127.0.0.1:1: start the server" in done.stderr
    assert "Traceback" not in done.stderr


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self._terminal, other = pty.openpty()
        self.process = subprocess.Popen(
            command,
            **{"cwd": ROOT, "stdin": other, "stdout": other, "stderr": other},
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(other)
        self.text = ""

    def wait_for(self, words: str, timeout_s: float = 60) -> str:
        """Text up to and including `words`; later calls begin after it."""
        end_s = time.monotonic() + timeout_s
        while words not in self.text:
            assert time.monotonic() < end_s, self.text
            if select.select([self._terminal], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.text += os.read(self._terminal, 65536).decode(errors="replace")
        before, _, self.text = self.text.partition(words)
        return before

    def send(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@pytest.fixture
def chat(tiny_model: str) -> Iterator[Terminal]:
    terminal = Terminal(*COMMAND, "chat", tiny_model, *FLAGS, "--system-prompt", "be short")
    try:
        yield terminal
    finally:
        terminal.close()


def test_a_terminal_chat_answers_and_forgets_the_conversation_on_clear(chat: Terminal) -> None:
    chat.wait_for("tiny: Ctrl-C stops an answer")
    chat.wait_for("> ")
    family = children_of(chat.process.pid)
    assert family

    chat.send("hello\n")
    answer = chat.wait_for("\r\n> ").partition("hello\r\n")[2]
    assert len(answer) > 5
    # The terminal sends SIGINT to its foreground group, which the server is not in.
    chat.send("go on\n")
    chat.wait_for("go on\r\n")
    os.killpg(chat.process.pid, signal.SIGINT)
    chat.wait_for("> ")
    chat.send("/foo\n")
    chat.wait_for("/foo\r\nunknown command /foo; commands: /clear, /system TEXT, ")
    chat.wait_for("> ")
    chat.send("/help me\n")
    chat.wait_for("/help me\r\nCommands: /clear, /system TEXT, ")
    chat.wait_for("> ")
    chat.send("/system\n")
    chat.wait_for("/system\r\nThe conversation is forgotten; there is no system prompt.\r\n> ")
    chat.send("/system be kind\n")
    chat.wait_for("be kind\r\nThe conversation is forgotten; the system prompt was changed.\r\n> ")
    chat.send("/etc/hosts is a file\n")
    answer = chat.wait_for("\r\n> ").partition("a file\r\n")[2]
    assert answer and not answer.startswith("unknown command")
    chat.send("/clear\n")
    chat.wait_for("/clear\r\nThe conversation is forgotten.\r\n> ")
    chat.send("hello\n")
    again = chat.wait_for("\r\n> ").partition("hello\r\n")[2]
    assert len(again) > 5
    chat.send("\x04")

    assert chat.process.wait(WAIT_S) == 0
    assert not any(map(alive, family))


def test_a_server_in_a_terminal_says_how_to_stop_it(tiny_model: str) -> None:
    terminal = Terminal(*COMMAND, "serve", tiny_model, *FLAGS, "--port=0")
    try:
        terminal.wait_for("Ready after")
        terminal.wait_for("Ctrl-C stops the server")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("\n")
        assert terminal.process.wait(WAIT_S) == 0
    finally:
        terminal.close()


def test_a_batch_prints_no_log_of_its_server(tiny_model: str, tmp_path: Path) -> None:
    write_batch(tmp_path / "in", 1, max_tokens=2)

    done = subprocess.run(
        batch(tmp_path, tiny_model, *FLAGS),
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120},
    )

    assert done.stdout == "1 line answered, 0 of them with an error\n"
    assert "Ready after" not in done.stderr and "POST /v1" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "status", "reason"),
    [
        (("/missing",), 1, "gaudiserve: no such file or folder: /missing; "),
        (("MODEL", "--kv-cache-memory-bytes=1K"), 2, "gaudiserve: the KV cache holds 0 tokens "),
    ],
)
def test_a_command_whose_server_does_not_start_ends_with_the_reason(
    tiny_model: str, tmp_path: Path, flags: tuple[str, ...], status: int, reason: str
) -> None:
    write_batch(tmp_path / "in", 1)
    given = [tiny_model if flag == "MODEL" else flag for flag in flags]
    for command in ([*COMMAND, "chat", "--quick=hi"], batch(tmp_path)):
        done = subprocess.run(
            [*command, *given, "--dtype=float32"],
            **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120},
        )

        assert done.returncode == status, done.stderr
        assert done.stderr.splitlines()[-1].startswith(reason)
        assert done.stderr.count(reason) == 1


def test_a_quick_chat_sends_the_key_of_the_variable(tiny_model: str, tmp_path: Path) -> None:
    command = [*COMMAND, "chat", "--quick=hello", "--max-tokens=3"]
    with running(tiny_model, tmp_path / "log", *FLAGS, "--api-key=secret") as live:
        codes = {}
        for key in ("secret", "wrong"):
            done = subprocess.run(
                [*command, f"--base-url={live.url}"],
                **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60},
                env={**os.environ, "OPENAI_API_KEY": key},
            )
            codes[key] = done.returncode

    assert codes == {"secret": 0, "wrong": 1}
    assert "set --api-key or OPENAI_API_KEY to the server's key" in done.stderr


def test_a_quick_chat_prints_the_answer_or_the_error(server: LiveServer) -> None:
    command = [*COMMAND, "chat", "--quick", "hello", "--base-url"]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60}

    done = subprocess.run([*command, server.url], **options)
    subprocess.run([*command, server.url, "--max-tokens=3"], check=True, **options)
    refused = subprocess.run([*command, server.url, "--max-tokens=0"], **options)
    missing = subprocess.run([*command, "http://127.0.0.1:1"], **options)

    assert done.returncode == 0 and len(done.stdout) > 5, done.stderr
    # The flag's default exceeds the room in the context of 256 tokens.
    lines = [line for line in server.text().splitlines() if "POST /v1/chat" in line]
    assert [line.partition("status=")[2][:3] for line in lines[-3:]] == ["200", "200", "400"]
    assert "output_tokens=3 " in lines[-2]
    assert refused.returncode == 1 and "max_tokens" in refused.stderr
    assert refused.stderr.startswith("gaudiserve: ")
    assert missing.returncode == 1
    assert missing.stderr.startswith("gaudiserve: no server answers at http://127.0.0.1:1")
