"""Runs checks in child processes. A check that fails, hangs or crashes ends its child, so that its
leftover state cannot affect other checks."""

import contextlib
import math
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import IO, NamedTuple

import msgspec

from engine.process.child_process import describe_exit, python_command, write_orders
from engine.selftest.results import CheckResult, result_of
from hpu.selftest.base import (
    FAILS,
    HANGS,
    HOLDS,
    LAZY,
    UNKNOWN,
    Began,
    Check,
    Ended,
    Orders,
    Report,
)

OPEN_LIMIT_S = 120.0
"""Maximum time to load the runtime and acquire the card; seconds."""
RELEASE_LIMIT_S = 30.0
"""Maximum wait for the release of a card after its process has ended; seconds."""
RETRY_S = 2.0
NOTICE_S = 5.0
"""Seconds without a report after which `on_wait` is called."""
MAX_FREE_HANGS = 2
"""Number of hanging checks whose time does not count against the time budget. With more hangs, the
card is likely not to respond to any check."""
RESTART_S = 10.0
"""Time to start a new process after a check that hangs; seconds."""
CLOSE_S = 5.0
TAIL_BYTES = 2000
"""Bytes of a crashed child's stderr that are read."""
BUSY = ("acquire", "busy")
"""Words in the runtime's error text if another process uses the card."""

OnResult = Callable[[CheckResult], None]
OnWait = Callable[[str], None]
"""Called with a description of what the runner is waiting for, and the maximum wait."""


class Place(NamedTuple):
    """Environment of the checks."""

    orders: Orders
    """Orders of a child, without checks, rank and folder."""
    environment: Callable[[bool, str], Mapping[str, str]]
    """Returns the variables of a child, given whether it uses lazy mode and its recipe folder."""
    num_cards: int
    start: str = "engine.selftest.child"
    """Module of the child."""


class ChecksStopped(NamedTuple):
    """The check at which the children stopped, its status and the reason. `name` is empty before
    the first check."""

    name: str
    status: str
    detail: str


class _Child:
    """A process that runs checks in order."""

    def __init__(
        self, module: str, orders: Orders, environment: Mapping[str, str], stderr: IO[bytes]
    ) -> None:
        self._process = subprocess.Popen(
            python_command(module, f"selftest {orders.rank}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=dict(environment),
            # Own process group, so that `close` also kills what the child has started.
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout
        write_orders(self._process.stdin.fileno(), orders)
        self.output = self._process.stdout
        self._text = b""

    def read(self) -> list[Report]:
        """Reports that have arrived. Raises EOFError at the end of the output."""
        data = os.read(self.output.fileno(), 1 << 16)
        if not data:
            raise EOFError
        *lines, self._text = (self._text + data).split(b"\n")
        return [msgspec.json.decode(line, type=Report) for line in lines]

    def describe_end(self) -> str:
        """How the process ended, for an error message. Call it once the process has closed its
        output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return describe_exit(self._process.wait(CLOSE_S))
        return "closed its output"

    def close(self, wait_s: float) -> None:
        """Wait at most `wait_s` for the process to end, then kill its process group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self.output):
            assert stream
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Runner:
    """Runs checks for at most `budget_s`, not counting the first MAX_FREE_HANGS checks that hang.
    Calls `on_result` after each check."""

    def __init__(self, place: Place, budget_s: float, on_result: OnResult, on_wait: OnWait) -> None:
        self._place = place
        self._end = time.monotonic() + budget_s
        self._budget_s = budget_s
        self._num_free_hangs = MAX_FREE_HANGS
        self._on_result = on_result
        self._on_wait = on_wait
        self.results: dict[str, CheckResult] = {}

    def run(self, checks: Iterable[Check]) -> Sequence[CheckResult]:
        """Run `checks`, in which a check follows the checks that it needs; returns the results in
        this order."""
        ordered = list(checks)
        # Checks with the same mode and number of ranks share a child.
        kinds = sorted(ordered, key=lambda check: (check.num_ranks, check.mode != LAZY))
        for _, group in groupby(kinds, key=lambda check: (check.num_ranks, check.mode)):
            self._run_group(list(group))
        return [self.results[check.name] for check in ordered]

    def _run_group(self, pending: list[Check]) -> None:
        while pending := self._left(pending):
            with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as stderr:
                stopped = self._run_children(pending, folder, stderr)
            by_name = {check.name: check for check in pending}
            if stopped.status == HANGS and self._num_free_hangs:
                self._num_free_hangs -= 1
                self._end += by_name[stopped.name].limit_s + RESTART_S
            for name in [stopped.name] if stopped.name else list(by_name):
                if name not in self.results:
                    self._add(result_of(by_name[name], stopped.status, stopped.detail))

    def _left(self, pending: list[Check]) -> list[Check]:
        """Checks without a result. Checks that cannot run get the result UNKNOWN."""
        for check in pending:
            if check.name in self.results:
                continue
            missing = [
                name
                for name in check.needs
                if name in self.results and self.results[name].status != HOLDS
            ]
            reason = ""
            if missing:
                reason = f"it needs {', '.join(missing)}"
            elif check.num_ranks > self._place.num_cards:
                reason = f"it needs {check.num_ranks} cards, found {self._place.num_cards}"
            elif time.monotonic() >= self._end:
                reason = f"the time budget of {self._budget_s:g} s was used up"
            if reason:
                self._add(result_of(check, UNKNOWN, reason))
        return [check for check in pending if check.name not in self.results]

    def _run_children(self, pending: list[Check], folder: str, stderr: IO[bytes]) -> ChecksStopped:
        """Run the checks until all have run or the children stop early. Retries while the card is
        still busy."""
        deadline = time.monotonic() + RELEASE_LIMIT_S
        while True:
            children = self._start(pending, folder, stderr)
            try:
                stopped = self._collect(children, pending, stderr)
            finally:
                ends_itself = all(check.name in self.results for check in pending)
                for child in children:
                    child.close(CLOSE_S if ends_itself else 0)
            is_busy = any(word in stopped.detail.lower() for word in BUSY) and not stopped.name
            if not is_busy or not self.results or time.monotonic() > deadline:
                return stopped
            time.sleep(RETRY_S)

    def _start(self, pending: list[Check], folder: str, stderr: IO[bytes]) -> list[_Child]:
        environment = self._place.environment(pending[0].mode == LAZY, folder)
        names = tuple(check.name for check in pending)
        count = pending[0].num_ranks
        return [
            _Child(
                self._place.start,
                msgspec.structs.replace(
                    self._place.orders, names=names, rank=rank, num_ranks=count, folder=folder
                ),
                environment,
                stderr,
            )
            for rank in range(count)
        ]

    def _collect(
        self, children: list[_Child], pending: list[Check], stderr: IO[bytes]
    ) -> ChecksStopped:
        """Read reports until all checks have ended or the children must be stopped."""
        by_name = {check.name: check for check in pending}
        ended: dict[str, list[Ended]] = {}
        num_ended: Counter[_Child] = Counter()
        current, allowed_s, began_s = "", OPEN_LIMIT_S, time.monotonic()
        notice_s = NOTICE_S
        with selectors.DefaultSelector() as selector:
            for child in children:
                selector.register(child.output, selectors.EVENT_READ, child)
            while any(name not in self.results for name in by_name):
                limit = min(began_s + allowed_s, self._end)
                next_s = min(limit, began_s + notice_s)
                ready = selector.select(max(0.0, next_s - time.monotonic()))
                now_s = time.monotonic()
                if not ready and now_s >= limit:
                    return _overdue(by_name.get(current), now_s >= self._end)
                if not ready and now_s >= next_s:
                    self._on_wait(f"{current or 'the card to open'}, at most {allowed_s:g} s")
                    notice_s = math.inf
                for key, _ in ready:
                    try:
                        reports = key.data.read()
                    except EOFError:
                        if num_ended[key.data] == len(pending):
                            # This rank has finished all its checks before the other ranks.
                            selector.unregister(key.data.output)
                            continue
                        return _crashed(current, key.data.describe_end(), stderr)
                    for report in reports:
                        if isinstance(report, Began):
                            current = report.name
                            allowed_s = by_name[current].limit_s if current else OPEN_LIMIT_S
                            began_s, notice_s = time.monotonic(), NOTICE_S
                        elif not report.name:
                            return ChecksStopped("", UNKNOWN, report.detail)
                        else:
                            num_ended[key.data] += 1
                            found = ended.setdefault(report.name, [])
                            found.append(report)
                            if len(found) == len(children) and self._is_over(by_name, found):
                                return ChecksStopped(report.name, FAILS, "")
        return ChecksStopped(current, HOLDS, "")

    def _is_over(self, by_name: Mapping[str, Check], ended: list[Ended]) -> bool:
        """Record the worst outcome of all ranks for a check; returns whether the check fails, so
        that its processes must end."""
        order = (HOLDS, UNKNOWN, FAILS)
        worst = max(ended, key=lambda report: order.index(report.status))
        result = result_of(by_name[worst.name], worst.status, worst.detail, worst.seconds)
        left = max(report.left_allocations for report in ended)
        self._add(msgspec.structs.replace(result, left_allocations=left))
        return worst.status == FAILS

    def _add(self, result: CheckResult) -> None:
        self.results[result.name] = result
        self._on_result(result)


def _overdue(check: Check | None, is_end: bool) -> ChecksStopped:
    name = check.name if check else ""
    if is_end:
        return ChecksStopped(name, UNKNOWN, "the time budget was used up")
    if not check:
        return ChecksStopped(name, UNKNOWN, f"the card was not opened within {OPEN_LIMIT_S:g} s")
    return ChecksStopped(check.name, HANGS, f"no answer within {check.limit_s:g} s")


def _crashed(name: str, ending: str, stderr: IO[bytes]) -> ChecksStopped:
    """Outcome for a child that ended with checks left, with the last line of its stderr. `name`:
    see ChecksStopped."""
    stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - TAIL_BYTES))
    lines = stderr.read().decode("utf-8", "replace").strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    return ChecksStopped(name, FAILS if name else UNKNOWN, f"its process {ending}{last}")
