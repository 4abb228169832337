"""deploy/torch_build.py and the Makefile: which torch pip installs, and what it is asked."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deploy.torch_build import (
    CPU_INDEX,
    INDEX_TIMEOUT_S,
    NoCpuBuild,
    choose,
    has_nvidia_gpu,
    index_answers,
    pinned,
)

ROOT = Path(__file__).parents[2]
OTHER = "https://example.com/whl"


class Machine:
    """Answers of a machine, and which of its questions were asked."""

    def __init__(self, gpu: bool = False, offered: tuple[str, ...] = (), answers: bool = True):
        self._gpu, self._offered, self._answers = gpu, offered, answers
        self.asked: list[str] = []

    def has_gpu(self) -> bool:
        self.asked.append("gpu")
        return self._gpu

    def offered(self) -> list[str]:
        self.asked.append("pip")
        return list(self._offered)

    def answers(self, index: str) -> bool:
        self.asked.append(index)
        return self._answers

    def choose(
        self, index: str | None = None, installed: str | None = None
    ) -> tuple[list[str], str]:
        return choose(
            "2.13.0",
            index=index,
            installed=installed,
            has_gpu=self.has_gpu,
            offered=self.offered,
            answers=self.answers,
        )


FROM_CPU_INDEX = ["--extra-index-url", CPU_INDEX, "torch==2.13.0+cpu"]


def test_without_a_gpu_the_cpu_build_comes_from_its_index() -> None:
    machine = Machine(offered=("2.14.0+cpu", "2.13.0"))

    words, reason = machine.choose()

    assert words == FROM_CPU_INDEX
    assert reason == f"torch 2.13.0+cpu from {CPU_INDEX}: there is no NVIDIA GPU"
    assert machine.asked == ["gpu", "pip", CPU_INDEX]


def test_a_cpu_build_that_pip_finds_is_taken_and_no_index_is_asked() -> None:
    machine = Machine(offered=("2.14.0", "2.13.0+cu130", "2.13.0+cpu", "2.13.0"))

    words, reason = machine.choose()

    assert words == ["torch==2.13.0+cpu"]
    assert reason == "torch 2.13.0+cpu, as pip finds it: there is no NVIDIA GPU"
    assert CPU_INDEX not in machine.asked


def test_cuda_is_never_taken_in_place_of_a_cpu_build_that_is_not_there() -> None:
    with pytest.raises(NoCpuBuild, match=r"within 60 s.*TORCH_INDEX=URL.*TORCH_INDEX=none"):
        Machine(offered=("2.13.0",), answers=False).choose()


def test_with_a_gpu_the_ordinary_build_is_taken_without_a_question() -> None:
    machine = Machine(gpu=True, offered=("2.13.0+cpu",))

    words, reason = machine.choose()

    assert words == []
    assert "CUDA" in reason
    assert machine.asked == ["gpu"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [(OTHER, ["--extra-index-url", OTHER]), ("", []), ("none", []), ("NONE ", [])],
)
def test_the_users_choice_comes_first(given: str, expected: list[str]) -> None:
    machine = Machine()

    words, reason = machine.choose(given)

    assert words == expected
    assert "by TORCH_INDEX" in reason
    assert machine.asked == []


@pytest.mark.parametrize("given", [None, OTHER])
def test_a_torch_that_is_installed_stays_and_nothing_is_asked(given: str | None) -> None:
    machine = Machine()

    words, reason = machine.choose(given, installed="2.13.0+cpu")

    assert words == []
    assert reason.startswith("torch 2.13.0+cpu is installed already")
    assert machine.asked == []
    assert machine.choose(installed="2.12.0")[0] == FROM_CPU_INDEX


def test_the_version_is_the_one_that_the_package_pins() -> None:
    assert pinned('dev = ["torch>=1"]\ncpu = ["torch==2.99.1"]\n') == "2.99.1"
    assert pinned((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[0] == "2"


def test_a_gpu_is_seen_as_a_device_or_by_the_drivers_tool(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    (full / "nvidia0").touch()
    (empty / "nvidiactl").touch()

    assert has_nvidia_gpu(full, ("false",))
    assert has_nvidia_gpu(empty, ("echo", "GPU 0: NVIDIA H200"))
    for command in ("echo No devices were found", "no-such-tool -L", "false"):
        assert not has_nvidia_gpu(empty, tuple(command.split()))


@contextmanager
def index_with(status: int, after_s: float = 0.0) -> Iterator[str]:
    """URL of an index that answers every request with `status` after `after_s` seconds."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            time.sleep(after_s)
            self.send_response(status if self.path == "/whl/torch/" else 400)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/whl"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "answers"), [(200, True), (404, False), (503, False)])
def test_an_index_answers_if_it_has_torch(status: int, answers: bool) -> None:
    with index_with(status) as url:
        assert index_answers(url) is answers


def test_a_slow_index_is_waited_for() -> None:
    with index_with(200, after_s=0.2) as url:
        assert not index_answers(url, timeout_s=0.05)
        assert index_answers(url, timeout_s=10)
    assert INDEX_TIMEOUT_S == 60


def test_an_index_that_says_nothing_is_waited_for_no_longer_than_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()

        answered = index_answers(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3)

        assert not answered
        assert time.monotonic() - begun < 1.5


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose .venv records how pip is called, on a machine with a GPU and without torch."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    # -S hides the packages of this environment, which include torch.
    python = f'#!/bin/sh\ncase $1 in deploy/*) exec {sys.executable} -S "$@";; esac\n'
    _write_program(tmp_path / ".venv" / "bin" / "python", python + 'echo "$@" >> calls\n')
    _write_program(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\necho GPU 0: NVIDIA H200\n")
    return tmp_path


def _write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("words", "flags", "line"),
    [
        ((), "", "torch {} with CUDA, as pip finds it: there is an NVIDIA GPU"),
        (("TORCH_INDEX=",), "", "torch {} as pip finds it, by TORCH_INDEX"),
        (("TORCH_INDEX=none",), "", "torch {} as pip finds it, by TORCH_INDEX"),
        (
            (f"TORCH_INDEX={OTHER}",),
            f"--extra-index-url {OTHER} ",
            f"torch {{}} from {OTHER}, by TORCH_INDEX",
        ),
    ],
)
def test_make_gives_pip_the_chosen_index(
    words: tuple[str, ...], flags: str, line: str, clone: Path
) -> None:
    # Without what a `make test TORCH_INDEX=...` hands down.
    ours = {name: v for name, v in os.environ.items() if name not in ("MAKEFLAGS", "TORCH_INDEX")}

    done = subprocess.run(
        ["make", "install", *words],
        cwd=clone,
        env={**ours, "PATH": f"{clone / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    calls = (clone / "calls").read_text().splitlines()
    version = pinned((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert done.returncode == 0, done.stderr
    assert f"install --progress-bar off {flags}--editable .[cpu]" in calls[0]
    assert "install --progress-bar off --editable .[dev]" in calls[-1]
    assert line.format(version) in done.stderr.splitlines()
