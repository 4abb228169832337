"""deploy/counted.py: no command of the Makefile is silent for long."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import counted
from deploy.counted import CLEAR_LINE, LINE_S, MAX_CHARACTERS, Counter, run, shorten

SCRIPT = Path(__file__).parents[2] / "deploy" / "counted.py"
SLOW = "print('Collecting torch', flush=True); import time; time.sleep(0.8); print('done')"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


@pytest.mark.parametrize("summarizes", [True, False])
def test_the_elapsed_seconds_of_a_silent_command_are_printed(
    summarizes: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    out = io.StringIO()

    status = run(python(SLOW), Counter("pip", out, line_s=0.2), summarizes=summarizes)

    assert status == 0
    assert re.search(r"^pip, \d+ s: collecting torch$", out.getvalue(), re.M) or not summarizes
    assert re.search(r"^pip, \d+ s$", out.getvalue(), re.M) or summarizes
    assert capfd.readouterr().out == ("" if summarizes else "Collecting torch\ndone\n")
    assert LINE_S == 5


def test_a_line_of_the_command_restarts_the_silence_timer() -> None:
    out = io.StringIO()
    program = "import sys, time; time.sleep(0.7); print('done', file=sys.stderr, flush=True); "

    run(python(f"{program} time.sleep(0.7)"), Counter("kernels", out, line_s=1), summarizes=False)

    assert out.getvalue() == "done\n"


def test_on_a_terminal_the_elapsed_time_is_a_single_line_that_is_cleared() -> None:
    out = Terminal()
    counter = Counter("pip", out)
    counter.step = "downloading " + "x" * 200

    counter.show()
    counter.clear()

    shown, rest = out.getvalue().split(CLEAR_LINE)[1:]
    assert shown.startswith("pip, 0 s: downloading") and len(shown) <= MAX_CHARACTERS
    assert rest == "" and counter.interval_s < LINE_S


def test_errors_and_the_exit_status_of_the_command_are_passed_on() -> None:
    program = "import sys; print('ERROR: no torch', file=sys.stderr); sys.exit(3)"

    done = subprocess.run(
        [sys.executable, "-S", SCRIPT, "--summarize", "pip", *python(program)],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stdout, done.stderr) == (3, "", "ERROR: no torch\n")


@pytest.mark.parametrize(
    ("lines", "step"),
    [
        ("Collecting torch==2.13.0 (from gaudiserve)", "collecting torch==2.13.0"),
        (
            "Collecting torch\n  Downloading https://a/b/torch-2.13.0-x.whl (192 MB)",
            "downloading torch",
        ),
        ("  Downloading uvicorn-0.54.0-py3-none-any.whl (1 MB)", "downloading uvicorn"),
        ("  Using cached h11-0.16.0-py3-none-any.whl", "taking h11 from the cache"),
        ("Obtaining file:///home/user/gaudiserve", "preparing the package of this folder"),
        ("Processing ./wheels/h11-0.16.0-py3-none-any.whl", "reading h11"),
        (
            "Building wheels for collected packages: gaudiserve\n"
            "  Building editable for gaudiserve (pyproject.toml): started",
            "building the package gaudiserve",
        ),
        ("Successfully built gaudiserve", "preparing the installation"),
        (
            "Installing collected packages: sortedcontainers, mpmath, uvloop",
            "installing 3 packages",
        ),
        (
            "Installing collected packages: a, setuptools\n  Attempting uninstall: setuptools\n"
            "    Found existing installation: setuptools 65.5.0\n"
            "    Uninstalling setuptools-65.5.0:\n"
            "      Successfully uninstalled setuptools-65.5.0\n",
            "installing 2 packages",
        ),
    ],
)
def test_the_output_of_pip_is_summarized_as_its_current_step(lines: str, step: str) -> None:
    counter = Counter("pip", io.StringIO())

    counter.follow(io.StringIO(lines), Path("nowhere"))

    assert counter.step == step


def test_a_repeated_warning_is_shown_once_and_a_repeated_error_each_time() -> None:
    out = io.StringIO()

    Counter("pip", out).relay(
        io.StringIO("WARNING: a\nERROR: b\n  WARNING: c\nWARNING: a\n  WARNING: c\nERROR: b\n")
    )

    assert out.getvalue().splitlines() == ["WARNING: a", "ERROR: b", "  WARNING: c", "ERROR: b"]


def test_a_long_line_is_truncated_after_a_word() -> None:
    line = "sortedcontainers, mpmath, uvloop, torch"

    assert shorten(line, 30) == "sortedcontainers, mpmath,..."
    assert shorten(line, len(line)) == line and shorten("x" * 99, 30) == "x" * 27 + "..."


def test_packages_are_counted_while_pip_installs_them(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.13" / "site-packages"
    counter = Counter("pip", out := Terminal())

    def install(name: str, *, is_whole: bool = True) -> None:
        (folder := packages / f"{name}.dist-info").mkdir(parents=True, exist_ok=True)
        # pip writes this file last, after the bytecode.
        if is_whole:
            (folder / "INSTALLER").touch()

    install("pip-25")
    counter.follow(io.StringIO("Installing collected packages: a, b, c\n"), tmp_path)
    counter.show()
    install("a-1", is_whole=False)
    counter.show()
    install("a-1")
    install("b-1")
    counter.show()
    (packages / "b-1.dist-info" / "INSTALLER").unlink()
    counter.show()
    install("b-2")
    install("c-2")
    counter.show()

    assert out.getvalue().split(CLEAR_LINE)[1:] == [
        *["pip, 0 s: installing 3 packages, 0 done, now a"] * 2,
        *["pip, 0 s: installing 3 packages, 2 done, now c"] * 2,
        "pip, 0 s: installing 3 packages, 3 done",
    ]


def test_an_unchanged_step_is_printed_at_increasing_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr(counted.time, "monotonic", lambda: now_s)
    counter = Counter("pip", out := io.StringIO())
    counter.step = "collecting torch"

    for now_s in range(5, 101, 5):
        counter.step = "installing 2 packages" if now_s > 70 else counter.step
        assert counter.silence_left_s() == 0
        counter.show()
        assert counter.silence_left_s() == LINE_S

    collecting = [f"pip, {seconds} s: collecting torch" for seconds in (5, 15, 35, 55)]
    installing = [f"pip, {seconds} s: installing 2 packages" for seconds in (75, 85)]
    assert out.getvalue().splitlines() == collecting + installing
