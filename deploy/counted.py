"""Runs a command, and says on stderr for how many seconds it has been running: no user has to guess
whether a command that is silent for minutes still works.

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
"""Between two counts, on a terminal and elsewhere."""
MAX_REPEAT_S = 20.0
"""Elsewhere, words without words are repeated after twice the time of the last repetition, at most
this."""
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
"""Lines of pip that begin a step. Its lines of an uninstall do not: it still installs then."""


def num_installed(environment: Path) -> int:
    """Number of distributions in a virtual environment. pip writes INSTALLER after the bytecode,
    the slowest part of a large package."""
    return sum(1 for _ in environment.glob("lib/python*/site-packages/*.dist-info/INSTALLER"))


def pip_step(line: str) -> str:
    """The step that a line of pip begins, in words; empty if it begins no step."""
    if found := PIP_INSTALLS.match(line):
        return f"installing {len(found[1].split(','))} packages"
    for pattern, words in PIP_STEPS:
        if found := pattern.match(line):
            return words.format(found[1])
    return ""


def shorten(line: str, most: int = MAX_CHARACTERS) -> str:
    """A line of `most` characters at most, which ends with a whole word where it has several."""
    if len(line) <= most:
        return line
    words = line[: most - 3]
    return (words.rpartition(" ")[0] or words) + "..."


class Installed:
    """How far pip's installation of `names` is, by the distributions in `environment`, which had
    `before` of them."""

    def __init__(self, names: list[str], environment: Path, before: int) -> None:
        self._names = names
        self._environment = environment
        self._before = before
        self._most = 0

    def describe(self) -> str:
        """The number of installed packages, and the name of the next."""
        # An upgrade removes a package before it installs the other one.
        self._most = max(self._most, num_installed(self._environment) - self._before)
        # pip installs in the order of its line.
        following = self._names[self._most : self._most + 1]
        return f", {self._most} done" + "".join(f", now {name}" for name in following)


class Counter:
    """The count: a line that is written anew on a terminal, elsewhere a line each time."""

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
        """The words of the last count, without the seconds."""
        self._repeat_s = self.interval_s
        """Time between the last count and a count of the same words."""
        self.step = ""
        """The step of the command, in words."""
        self.progress: Callable[[], str] = str
        """How far the step is, in words."""

    def silence_left_s(self) -> float:
        """Seconds until the count is due: `interval_s` after the last line. A line of the command
        may be its last, and a count right behind the line would seem to be about later work."""
        return max(0.0, self._due_s - time.monotonic())

    def show(self) -> None:
        """Write the count, except off a terminal a repetition that comes too soon."""
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
        """Write `lines` of the command between the counts, a repeated warning once."""
        warnings = set()
        for line in lines:
            if line not in warnings:
                self._write(line)
            if line.lstrip().startswith(WARNING):
                warnings.add(line)

    def follow(self, lines: IO[str], environment: Path) -> None:
        """Keep the last step among `lines` of pip for the count. pip says nothing while it installs
        packages into `environment`, so these are counted there."""
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
    """The command's exit status. With `summarizes` it is pip, whose steps are in the count."""
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
        # Ctrl-C reaches the command too, which ends by itself.
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
    """Run the command of the arguments; returns its exit status."""
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
