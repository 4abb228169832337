"""Child commands end together with all processes that they have started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_ends import is_alive, pid_in
from waits import WAIT_S, wait_for

from config.child_command import running

ROOT = Path(__file__).resolve().parents[2]
TREE = "sleep 300 & echo $! > child; wait"
"""Shell command that starts a process and waits for it, like g++ with cc1plus."""
OWNER = f"""
import sys
from config.child_command import running
with running(["sh", "-c", {TREE!r}]) as process:
    process.wait()
"""
RUNS_COMMANDS = {
    # A child running Python, which watches its stdin.
    "engine/process/child_process.py",
    # A fork server: its control channel closes when this process ends.
    "engine/process/isolation.py",
    # A process group: the kernel kills its leader together with this process.
    "engine/selftest/runner.py",
    "config/child_command.py",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_descendants_end_when_this_process_is_killed(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", OWNER], env=environment) as owner:
        pid = pid_in(Path("child"))
        assert is_alive(pid)

        owner.send_signal(number)

        wait_for(lambda: not is_alive(pid))


def test_descendants_end_when_the_with_block_exits() -> None:
    with pytest.raises(ZeroDivisionError), running(["sh", "-c", TREE]):
        pid = pid_in(Path("child"))
        raise ZeroDivisionError

    wait_for(lambda: not is_alive(pid))


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -KILL $$", -9)])
def test_the_exit_status_of_the_command_is_returned(script: str, status: int) -> None:
    with running(["sh", "-c", script]) as process:
        assert process.wait(WAIT_S) == status


def test_the_output_of_a_command_is_complete() -> None:
    with running(["sh", "-c", "echo out; echo err >&2"], stderr=subprocess.STDOUT) as process:
        assert process.communicate(timeout=WAIT_S)[0] == b"out\nerr\n"


def test_only_listed_modules_start_programs() -> None:
    sources = [
        file
        for name in ("config", "hpu", "engine", "server")
        for file in (ROOT / name).rglob("*.py")
    ]

    found = {
        str(file.relative_to(ROOT))
        for file in sources
        if any(word in file.read_text() for word in ("subprocess.Popen(", "subprocess.run("))
    }

    assert found == RUNS_COMMANDS
