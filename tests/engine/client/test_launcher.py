"""Engine processes: start, supervision and stop, and the imports that an API server needs for
them."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from counting_worker import ROOT, counting_command
from engine_rig import counting_config
from live import alive
from waits import WAIT_S

from config.data_parallel import DataParallelConfig
from config.engine import EngineConfig
from config.log import LogConfig
from engine.client.launcher import EngineOrders, front_end_endpoints, launch, share_cores
from engine.process.child_process import (
    FAULTS,
    STOP,
    ChildProcess,
    ProcessEnd,
    describe_exit,
    is_external_end,
    python_command,
)


def launched(directory: Path, endings: list[str], died: threading.Event) -> ChildProcess:
    def on_exit(end: ProcessEnd) -> None:
        endings.append(end.description)
        died.set()

    return launch(
        EngineOrders(counting_config(), str(directory), 0, "token", log=LogConfig("error")),
        on_exit=on_exit,
        command=counting_command("engine"),
    )


def wait_for_mask(pid: int, mask: str) -> None:
    """Wait until the process catches (SigCgt) or ignores (SigIgn) STOP."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        status = Path(f"/proc/{pid}/status").read_text()
        signals = int(re.findall(rf"{mask}:\s*(\w+)", status)[0], 16)
        if signals >> (STOP - 1) & 1:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} has no STOP in {mask} after {WAIT_S:g} s")


def test_a_crash_is_reported_once_with_process_and_signal(tmp_path: Path) -> None:
    endings: list[str] = []
    died = threading.Event()
    engine = launched(tmp_path, endings, died)
    running = engine.poll()

    os.kill(engine.pid, signal.SIGKILL)
    heard = died.wait(WAIT_S)

    assert running is None and heard
    assert engine.poll() == -signal.SIGKILL
    assert endings == [f"the engine (process {engine.pid}) was killed by SIGKILL"]
    engine.close()
    engine.close()


def test_closing_stops_the_process_without_a_crash_report(tmp_path: Path) -> None:
    endings: list[str] = []
    engine = launched(tmp_path, endings, threading.Event())
    wait_for_mask(engine.pid, "SigCgt")

    engine.close(WAIT_S)
    time.sleep(0.1)

    assert engine.poll() == 0
    assert not alive(engine.pid)
    assert endings == []


def test_a_child_that_does_not_stop_is_killed() -> None:
    code = f"import signal, time; signal.signal({int(STOP)}, signal.SIG_IGN); time.sleep(60)"
    child = ChildProcess("stubborn", [sys.executable, "-c", code], {})
    wait_for_mask(child.pid, "SigIgn")

    child.close(0.2)

    assert child.poll() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "sentence"),
    [(0, "exited with code 0"), (-11, "was killed by SIGSEGV"), (-99, "was killed by signal 99")],
)
def test_an_exit_code_is_described_in_a_sentence(code: int, sentence: str) -> None:
    assert describe_exit(code) == sentence


def test_a_users_config_module_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("raise SystemExit('the wrong config')")
    command = python_command("config.errors", "no main")

    done = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )

    assert "cannot import name 'main' from 'config.errors'" in done.stderr


def test_ps_shows_the_title_and_variables_of_a_process() -> None:
    code = (
        "from pathlib import Path; from engine.process.child_process import set_title; "
        "set_title('engine 3'); print(Path('/proc/self/cmdline').read_text().strip(chr(0))); "
        "print('MARK=here' in Path('/proc/self/environ').read_text().split(chr(0)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "MARK": "here"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.stdout.split("\n")[:2] == ["gaudiserve: engine 3", "True"], done.stderr


def test_a_front_end_loads_no_torch() -> None:
    code = "import engine.client.zmq, engine.client.launcher, sys; print('torch' in sys.modules)"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )

    assert done.stdout.strip() == "False", done.stderr


def test_engines_on_one_cpu_share_its_cores() -> None:
    four = DataParallelConfig(data_parallel_size=4)

    shared = share_cores(EngineConfig(model="m", device="cpu", data_parallel=four), 10)
    chosen = share_cores(EngineConfig(model="m", device="cpu", num_threads=7, data_parallel=four))
    alone = share_cores(EngineConfig(model="m", device="cpu"))
    on_cards = share_cores(EngineConfig(model="m", device="hpu", data_parallel=four))

    threads = [item.num_threads for item in (shared, chosen, alone, on_cards)]
    assert threads == [2, 7, None, None]


def test_each_engine_has_an_address_at_each_front_end() -> None:
    local = DataParallelConfig(data_parallel_size=2)
    both = DataParallelConfig(
        data_parallel_size=4, data_parallel_size_local=2, data_parallel_address="10.0.0.1"
    )

    assert front_end_endpoints(DataParallelConfig(), "/d", 1) == ("ipc:///d/fe1.sock",)
    assert front_end_endpoints(local, "/d", 1) == ("ipc:///d/fe1.sock", "ipc:///d/fe1-1.sock")
    assert front_end_endpoints(both, "/d", 1) == (
        "ipc:///d/fe1.sock",
        "ipc:///d/fe1-1.sock",
        "tcp://10.0.0.1:29556",
        "tcp://10.0.0.1:29557",
    )


@pytest.mark.parametrize("code", [0, 1, *(-number for number in sorted(FAULTS))])
def test_only_exits_by_sigkill_and_sigterm_are_external(code: int) -> None:
    assert not is_external_end(code)
    assert is_external_end(-signal.SIGKILL) and is_external_end(-signal.SIGTERM)
