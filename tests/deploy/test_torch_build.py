"""deploy/torch_build.py and the Makefile: the torch build that pip installs, and the queries before
it."""

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
    index_problem,
    pinned,
)

ROOT = Path(__file__).parents[2]
OTHER = "https://example.com/whl"


class Machine:
    """Fake machine with fixed answers, which records the questions."""

    def __init__(self, gpu: bool = False, offered: tuple[str, ...] = (), problem: str = ""):
        self._gpu, self._offered, self._problem = gpu, offered, problem
        self.asked: list[str] = []

    def has_gpu(self) -> bool:
        self.asked.append("gpu")
        return self._gpu

    def offered(self) -> list[str]:
        self.asked.append("pip")
        return list(self._offered)

    def problem(self, index: str) -> str:
        self.asked.append(index)
        return self._problem

    def choose(
        self, index: str | None = None, installed: str | None = None
    ) -> tuple[list[str], str]:
        return choose(
            "2.13.0",
            index=index,
            installed=installed,
            has_gpu=self.has_gpu,
            offered=self.offered,
            problem=self.problem,
        )


FROM_CPU_INDEX = ["--extra-index-url", CPU_INDEX, "torch==2.13.0+cpu"]


def test_without_a_gpu_the_cpu_build_is_installed_from_its_index() -> None:
    machine = Machine(offered=("2.14.0+cpu", "2.13.0"))

    words, reason = machine.choose()

    assert words == FROM_CPU_INDEX
    assert reason == f"torch 2.13.0+cpu from {CPU_INDEX}: there is no NVIDIA GPU"
    assert machine.asked == ["gpu", "pip", CPU_INDEX]


def test_a_cpu_build_that_pip_finds_is_used_without_the_cpu_index() -> None:
    machine = Machine(offered=("2.14.0", "2.13.0+cu130", "2.13.0+cpu", "2.13.0"))

    words, reason = machine.choose()

    assert words == ["torch==2.13.0+cpu"]
    assert reason == "torch 2.13.0+cpu, as pip finds it: there is no NVIDIA GPU"
    assert CPU_INDEX not in machine.asked


def test_a_missing_cpu_build_is_never_replaced_by_a_cuda_build() -> None:
    with pytest.raises(
        NoCpuBuild, match=r"used: no such host; .*TORCH_INDEX=URL.*TORCH_INDEX=none"
    ):
        Machine(offered=("2.13.0",), problem="no such host").choose()


def test_with_a_gpu_the_default_build_is_chosen_without_queries() -> None:
    machine = Machine(gpu=True, offered=("2.13.0+cpu",))

    words, reason = machine.choose()

    assert words == []
    assert "CUDA" in reason
    assert machine.asked == ["gpu"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [(OTHER, ["--extra-index-url", OTHER]), ("", []), ("none", []), ("NONE ", [])],
)
def test_the_index_of_the_user_takes_precedence(given: str, expected: list[str]) -> None:
    machine = Machine()

    words, reason = machine.choose(given)

    assert words == expected
    assert "by TORCH_INDEX" in reason
    assert machine.asked == []


@pytest.mark.parametrize("given", [None, OTHER])
def test_an_installed_torch_stays_without_queries(given: str | None) -> None:
    machine = Machine()

    words, reason = machine.choose(given, installed="2.13.0+cpu")

    assert words == []
    assert reason.startswith("torch 2.13.0+cpu is installed already")
    assert machine.asked == []
    assert machine.choose(installed="2.12.0")[0] == FROM_CPU_INDEX


def test_the_version_is_pinned_by_the_package() -> None:
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
def test_index_problem_reports_the_status_of_an_index_without_torch(
    status: int, answers: bool
) -> None:
    with index_with(status) as url:
        problem = index_problem(url)
        assert not problem if answers else str(status) in problem


def test_a_slow_index_is_waited_for() -> None:
    with index_with(200, after_s=0.2) as url:
        assert index_problem(url, timeout_s=0.05) == "it gave no answer within 0.05 s"
        assert not index_problem(url, timeout_s=10)
    assert INDEX_TIMEOUT_S == 60


def test_an_unresponsive_index_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()

        refusal = index_problem(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3)

        assert refusal == "it gave no answer within 0.3 s"
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


def _make(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # Without the variables that `make test TORCH_INDEX=...` exports.
    ours = {name: v for name, v in os.environ.items() if name not in ("MAKEFLAGS", "TORCH_INDEX")}
    return subprocess.run(
        ["make", *words],
        cwd=clone,
        env={**ours, "PATH": f"{clone / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


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
    done = _make(clone, "install-dev", *words)

    calls = (clone / "calls").read_text().splitlines()
    version = pinned((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert done.returncode == 0, done.stderr
    assert f"install --progress-bar off {flags}--editable .[cpu]" in calls[0]
    assert "install --progress-bar off --editable .[dev]" in calls[-1]
    assert line.format(version) in done.stderr.splitlines()


def test_install_for_serving_has_no_packages_of_the_tests(clone: Path) -> None:
    done = _make(clone, "install")
    vendor = _make(clone, "-n", "install-hpu")

    assert done.returncode == vendor.returncode == 0, done.stderr + vendor.stderr
    assert ".[cpu]" in (clone / "calls").read_text()
    assert "--editable ." in vendor.stdout
    assert "dev]" not in (clone / "calls").read_text() + vendor.stdout


def test_packages_of_the_tests_keep_the_versions_of_the_vendor(clone: Path) -> None:
    for name in ("vendor.txt", ".installed"):
        (clone / ".venv" / name).touch()

    done = _make(clone, "install-dev")

    assert done.returncode == 0, done.stderr
    (call,) = (clone / "calls").read_text().splitlines()
    assert call.endswith("--constraint .venv/vendor.txt --editable .[dev]")


@pytest.mark.parametrize("is_vendor", [False, True])
def test_make_n_installs_nothing(is_vendor: bool, clone: Path) -> None:
    if is_vendor:
        (clone / ".venv" / "vendor.txt").touch()

    done = _make(clone, "-n", "install")

    assert done.returncode == 0, done.stderr
    assert not (clone / "calls").exists()
    assert "install --progress-bar off" in done.stdout


def test_a_variable_of_make_in_small_letters_is_an_error() -> None:
    command = ["make", "-n", "-f", ROOT / "Makefile", "help", "model=demo"]

    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.returncode != 0
    assert "model= has no effect" in ended.stderr
