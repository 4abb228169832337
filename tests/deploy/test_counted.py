"""deploy/counted.py: no command of the Makefile is silent for long."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.counted import CLEAR_LINE, LINE_S, Counter, run

SCRIPT = Path(__file__).parents[2] / "deploy" / "counted.py"
SLOW = "print('Collecting torch', flush=True); import time; time.sleep(0.8); print('done')"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


@pytest.mark.parametrize("summarizes", [True, False])
def test_a_silent_command_is_counted_with_its_last_words(
    summarizes: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    out = io.StringIO()

    status = run(python(SLOW), Counter("pip", out, line_s=0.2), summarizes=summarizes)

    assert status == 0
    assert re.search(r"^pip, \d+ s: Collecting torch$", out.getvalue(), re.M) or not summarizes
    assert re.search(r"^pip, \d+ s$", out.getvalue(), re.M) or summarizes
    assert capfd.readouterr().out == ("" if summarizes else "Collecting torch\ndone\n")
    assert LINE_S == 5


def test_on_a_terminal_the_count_is_one_line_that_is_removed() -> None:
    out = Terminal()
    counter = Counter("pip", out)
    counter.step = "Installing " + "x" * 200

    counter.show()
    counter.clear()

    shown, rest = out.getvalue().split(CLEAR_LINE)[1:]
    assert shown.startswith("pip, 0 s: Installing x") and len(shown) == 72
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
