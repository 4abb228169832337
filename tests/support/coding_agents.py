"""A workplace in which coding agents run as configured in docs/clients.md, with this machine as
their only network, and the scripted answers of the model in tests/clients/agents."""

import os
import re
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = (
    ROOT / "tests" / "clients" / "agents" / "node_modules" / ".bin",
    ROOT / ".venv-aider" / "bin",
)
DOCUMENTED_URL = "http://localhost:8000"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIME_LIMIT_S = 120

PROMPT = "Answer with a sentence."
ANSWER = "This sentence is the whole answer: 7 + 5 = 12."
NOTE = "The password is swordfish."
READ_NOTE = "I have read the note. It names a fish."
THOUGHT = "The command cat prints a file."
INTENT = "I read the note."
COPY = "This is the copy."


def call(name: str, arguments: str) -> str:
    """Reasoning, a sentence and a tool call, as the model writes them."""
    function = f'{{"name": "{name}", "arguments": {arguments}}}'
    return f"<think>{THOUGHT}</think>{INTENT}\n<tool_call>\n{function}\n</tool_call>"


ANSWERS = {
    PROMPT: ANSWER,
    "Read the note with exec_command.": call("exec_command", '{"cmd": "cat note.txt"}'),
    "Read the note with Bash.": call("Bash", '{"command": "cat note.txt"}'),
    "Read the note with bash.": call(
        "bash", '{"command": "cat note.txt", "description": "Print the note"}'
    ),
    "Write copy.txt, then test.": f"I write the file.\n\ncopy.txt\n```\n{COPY}\n```\n",
    NOTE: READ_NOTE,
}
"""Scripted answers of the model, by the last phrase in user messages and tool results. The answer
READ_NOTE proves that the command's output and the reasoning before the call reached the model."""


def needs(program: str, requirement: str) -> pytest.MarkDecorator:
    """A mark that skips tests if the program, which `make test-clients` installs, is missing."""
    is_installed = any((folder / program).exists() for folder in PROGRAMS)
    reason = f"{program} is not installed: `make test-clients` installs it with {requirement}"
    return pytest.mark.skipif(not is_installed, reason=reason)


class RefusingProxy(ThreadingHTTPServer):
    """An HTTP proxy that refuses all connections and records the requested hosts in `asked`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RefusedRequest)
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class RefusedRequest(BaseHTTPRequestHandler):
    """Answers with 403."""

    server: RefusingProxy

    def refuse(self) -> None:
        self.server.asked.append(self.path)
        self.send_error(403)

    do_CONNECT = do_GET = do_HEAD = do_POST = refuse

    def log_message(self, *_: object) -> None:
        """Keep requests out of the test output."""


class Workplace:
    """A folder with note.txt and an empty home in which an agent runs."""

    def __init__(self, folder: Path, url: str, proxy: RefusingProxy) -> None:
        self.folder = folder / "work"
        self.home = folder / "home"
        self._url = url
        self._proxy = proxy
        self.folder.mkdir()
        self.home.mkdir()
        (self.folder / "note.txt").write_text(f"{NOTE}\n")

    @property
    def asked_hosts(self) -> list[str]:
        """Hosts other than this machine that programs requested."""
        return self._proxy.asked

    def documented(self, section: str, language: str) -> str:
        """The code in this language from a section of docs/clients.md, with the server's
        address."""
        page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
        text = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
        return "".join(code for kind, code in BLOCK.findall(text) if kind == language).replace(
            DOCUMENTED_URL, self._url
        )

    def run(self, script: str, status: int = 0) -> str:
        """Output of a shell script that must end with `status`; of the environment it inherits only
        PATH."""
        proxy = self._proxy.url
        environment = {
            "PATH": os.pathsep.join([*map(str, PROGRAMS), os.environ["PATH"]]),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), proxy),
            **dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1"),
        }
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout
