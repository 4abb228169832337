"""Runs a command, and prints on stderr for how many seconds it has been running, so that users can
see that a command that is silent for minutes is still running.

Imports only the standard library: it runs before anything is installed.
"""

import argparse
import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

TERMINAL_S, LINE_S = 1.0, 5.0
"""Seconds between two counts, on a terminal and elsewhere."""
MAX_REPEAT_S = 20.0
"""Maximum seconds until an unchanged count is repeated, except on a terminal. The interval doubles
with each repetition."""
MAX_CHARACTERS = 72
CLEAR_LINE = "\r\x1b[K"
WARNING = "WARNING:"
PIP_STEPS = (
    (re.compile(r"Collecting (\S+)"), "collecting {}"),
    (re.compile(r"Downloading (?:\S*/)?([^\s/]+?)-\d"), "downloading {}"),
    (re.compile(r"Using cached (?:\S*/)?([^\s/]+?)-\d"), "taking {} from the cache"),
    (re.compile(r"Processing (?:\S*/)?([^\s/]+?)-\d"), "reading {}"),
    (re.compile(r"Obtaining ()"), "preparing the package of this folder"),
    (re.compile(r"Building \w+ for (\S+) \("), "building the package {}"),
    (re.compile(r"Successfully built ()"), "preparing the installation"),
)
PIP_INSTALLS = re.compile(r"Installing collected packages: (.*)")
"""Lines of pip that begin a step. Lines about an uninstallation begin no step: pip is still
installing."""


def num_installed(environment: Path) -> int:
    """Number of distributions in a virtual environment. pip writes INSTALLER after the bytecode,
    the slowest part of a large package."""
    return sum(1 for _ in environment.glob("lib/python*/site-packages/*.dist-info/INSTALLER"))


def pip_step(line: str) -> str:
    """Description of the step that a line of pip begins; empty if it begins no step."""
    if found := PIP_INSTALLS.match(line):
        return f"installing {len(found[1].split(','))} packages"
    for pattern, words in PIP_STEPS:
        if found := pattern.match(line):
            return words.format(found[1])
    return ""


def shorten(line: str, most: int = MAX_CHARACTERS) -> str:
    """`line`, cut to at most `most` characters and at the end of a word if it has several words."""
    if len(line) <= most:
        return line
    words = line[: most - 3]
    return (words.rpartition(" ")[0] or words) + "..."


class Installed:
    """Progress of pip's installation of `names`: the distributions in `environment` beyond the
    `before` that were there at the start."""

    def __init__(self, names: list[str], environment: Path, before: int) -> None:
        self._names = names
        self._environment = environment
        self._before = before
        self._most = 0

    def describe(self) -> str:
        """Number of installed packages, and the name of the next."""
        # An upgrade removes a package before it installs the new version.
        self._most = max(self._most, num_installed(self._environment) - self._before)
        # pip installs packages in the order of its line.
        following = self._names[self._most : self._most + 1]
        return f", {self._most} done" + "".join(f", now {name}" for name in following)


class Counter:
    """Display of the elapsed seconds: a line that is rewritten on a terminal, and a new line each
    time elsewhere."""

    def __init__(self, words: str, out: IO[str], line_s: float = LINE_S) -> None:
        self._words = words
        self._out = out
        self._is_terminal = out.isatty()
        self._begun_s = time.monotonic()
        self._lock = threading.Lock()
        self._last_write_s = self._begun_s
        self.interval_s = TERMINAL_S if self._is_terminal else line_s
        self._due_s = self._begun_s + self.interval_s
        self._last_words = ""
        """Step and progress of the last count, without the seconds."""
        self._repeat_s = self.interval_s
        """Seconds until the same step and progress are shown again."""
        self.step = ""
        """Description of the command's current step."""
        self.progress: Callable[[], str] = str
        """Function that describes the progress of the step."""

    def silence_left_s(self) -> float:
        """Seconds until the next count: `interval_s` after the last line. A count right after a
        line of the command would seem to be about later work."""
        return max(0.0, self._due_s - time.monotonic())

    def show(self) -> None:
        """Write the count. Outside of a terminal, omit a repetition before its time."""
        now_s = time.monotonic()
        words = f": {self.step}{self.progress()}" if self.step else ""
        line = shorten(f"{self._words}, {now_s - self._begun_s:.0f} s{words}")
        if self._is_terminal:
            self._write(line)
            return
        is_new = words != self._last_words
        if is_new or now_s >= self._last_write_s + self._repeat_s:
            self._repeat_s = min(2 * (self.interval_s if is_new else self._repeat_s), MAX_REPEAT_S)
            self._last_words = words
            self._write(f"{line}\n")
        else:
            self._due_s = now_s + self.interval_s

    def relay(self, lines: IO[str]) -> None:
        """Write `lines` of the command between the counts, and a repeated warning only once."""
        warnings = set()
        for line in lines:
            if line not in warnings:
                self._write(line)
            if line.lstrip().startswith(WARNING):
                warnings.add(line)

    def follow(self, lines: IO[str], environment: Path) -> None:
        """Record the last step in `lines` of pip for the count. pip prints nothing while it
        installs packages into `environment`, so installed packages are counted."""
        before = num_installed(environment)
        for line in map(str.strip, lines):
            self.step = pip_step(line) or self.step
            if found := PIP_INSTALLS.match(line):
                self.progress = Installed(found[1].split(", "), environment, before).describe

    def clear(self) -> None:
        """Remove the count from a terminal."""
        self._write("")

    def _write(self, text: str) -> None:
        with self._lock:
            print(f"{CLEAR_LINE if self._is_terminal else ''}{text}", end="", file=self._out)
            self._out.flush()
            self._last_write_s = time.monotonic()
            self._due_s = self._last_write_s + self.interval_s


def run(command: list[str], counter: Counter, *, summarizes: bool) -> int:
    """Run the command and return its exit status. `summarizes`: the command is pip, whose steps are
    shown in the count."""
    stdout = subprocess.PIPE if summarizes else None
    with subprocess.Popen(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None
        readers = [threading.Thread(target=counter.relay, args=(process.stderr,))]
        if process.stdout is not None:
            environment = Path(command[0]).parent.parent
            readers.append(
                threading.Thread(target=counter.follow, args=(process.stdout, environment))
            )
        for reader in readers:
            reader.start()
        # Ctrl-C also reaches the command, which ends by itself.
        with contextlib.suppress(KeyboardInterrupt):
            _count_until_end(process, counter)
        status = process.wait()
        for reader in readers:
            reader.join()
    counter.clear()
    return status


def _count_until_end(process: "subprocess.Popen[str]", counter: Counter) -> None:
    while not _ends_within(counter.silence_left_s(), process):
        if not counter.silence_left_s():
            counter.show()


def _ends_within(seconds: float, process: "subprocess.Popen[str]") -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def main(arguments: list[str]) -> int:
    """Run the command in `arguments`; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--summarize", action="store_true", help="the command is pip: show its steps in the count"
    )
    parser.add_argument("words", help="description of what the command does")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    return run(given.command, Counter(given.words, sys.stderr), summarizes=given.summarize)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
