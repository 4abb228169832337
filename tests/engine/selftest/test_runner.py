"""Runner: reports of child processes become results; a hang, a crash and a failure end only their
child.

The child is a script without torch; tests/e2e/test_selftest.py runs on the emulated card.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from engine.selftest import runner
from engine.selftest.results import CheckResult
from engine.selftest.runner import OnResult, OnWait, Place, Runner
from hpu.selftest.base import COMPILE, LAZY, Card, Check, Fallback, Orders

CHILD = """
import json, os, signal, subprocess, sys, time
from engine.process.child_process import read_orders
from hpu.selftest.base import Orders

def say(kind, name, **facts):
    os.write(1, (json.dumps({"type": kind, "name": name, **facts}) + "\\n").encode())

def main():
    orders = read_orders(Orders)
    folder = os.environ["SCRIPT"]
    with open(f"{folder}/starts", "a") as starts:
        starts.write(f"{os.environ['MODE']} {','.join(orders.names)}\\n")
    say("Began", "")
    if os.path.exists(f"{folder}/busy"):
        os.unlink(f"{folder}/busy")
        say("Ended", "", status="unknown", detail="Device already acquired")
        return
    for name in orders.names:
        if name == f"late-on-rank-{orders.rank}":
            time.sleep(0.2)
        say("Began", name)
        if name.startswith("hang"):
            child = subprocess.Popen(["sleep", "300"])
            open(f"{folder}/grandchild", "w").write(str(child.pid))
            time.sleep(300)
        if name.startswith("crash"):
            sys.stderr.write("synapse: fatal\\n")
            sys.stderr.flush()
            os.abort()
        status = "fails" if name.startswith("fail") else "holds"
        if name == f"fail-on-rank-{1 - orders.rank}":
            status = "holds"
        say("Ended", name, status=status, detail="" if status == "holds" else "3, expected 4")
"""
AVOID = (Fallback("some-flag", ("off",)),)


def check(name: str, *, mode: str = LAZY, needs: tuple[str, ...] = (), num_ranks: int = 1) -> Check:
    def program(card: Card) -> tuple[()]:
        return ()

    # Two processes may start in sequence on a busy machine.
    limit_s = LIMIT_S if num_ranks == 1 else 10.0
    return Check(name, "", "", program, AVOID, mode, needs, limit_s=limit_s, num_ranks=num_ranks)


Run = Callable[..., list[CheckResult]]
LIMIT_S = 1.5
"""Time limit of a check of one rank: a check that answers takes some milliseconds."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "scripted_child.py").write_text(CHILD)

    def environment(is_lazy: bool, folder: str) -> Mapping[str, str]:
        own = {"SCRIPT": str(tmp_path), "MODE": "lazy" if is_lazy else "compile"}
        return {**os.environ, "PYTHONPATH": str(tmp_path), **own}

    def run(
        *checks: Check,
        num_cards: int = 1,
        budget_s: float = 60.0,
        on_result: OnResult = lambda result: None,
        on_wait: OnWait = lambda what: None,
    ) -> list[CheckResult]:
        place = Place(Orders("hpu"), environment, num_cards, "scripted_child")
        return list(Runner(place, budget_s, on_result, on_wait).run(checks))

    return run


def statuses(results: list[CheckResult]) -> dict[str, str]:
    return {result.name: result.status for result in results}


def test_checks_of_a_mode_share_a_child_until_a_check_does_not_hold(
    run: Run, tmp_path: Path
) -> None:
    results = run(check("a"), check("fail"), check("b", mode=COMPILE), check("c"))

    assert statuses(results) == {"a": "holds", "fail": "fails", "b": "holds", "c": "holds"}
    starts = (tmp_path / "starts").read_text().splitlines()
    assert starts == ["lazy a,fail,c", "lazy c", "compile b"]
    assert [result.fallbacks != () for result in results] == [False, True, False, False]
    assert results[1].detail == "3, expected 4"


def test_a_hang_is_a_result_and_leaves_no_process(run: Run, tmp_path: Path) -> None:
    start = time.monotonic()

    results = run(check("hang"), check("a"))

    assert statuses(results) == {"hang": "hangs", "a": "holds"}
    assert results[0].detail == f"no answer within {LIMIT_S} s"
    assert time.monotonic() - start < 120
    pid = int((tmp_path / "grandchild").read_text())
    assert not _runs(pid)


@pytest.mark.parametrize(("num_hangs", "status"), [(2, "holds"), (3, "unknown")])
def test_the_first_two_hangs_take_no_time_from_other_checks(
    num_hangs: int, status: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped_s = 0.0
    now = time.monotonic
    monkeypatch.setattr(runner, "RESTART_S", 1000.0)
    monkeypatch.setattr(runner.time, "monotonic", lambda: now() + skipped_s)

    def pass_time(result: CheckResult) -> None:
        nonlocal skipped_s
        skipped_s += 900.0

    hangs = [check(f"hang{number}") for number in range(num_hangs)]

    results = run(*hangs, check("a"), on_result=pass_time)

    hung = {hang.name: "hangs" for hang in hangs}
    assert statuses(results) == {**hung, "a": status}


def test_a_silent_check_is_reported_while_it_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "NOTICE_S", 0.1)
    waits: list[str] = []

    run(check("hang"), on_wait=waits.append)

    assert waits[-1] == f"hang, at most {LIMIT_S} s"
    assert waits.count(waits[-1]) == 1


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def test_a_crash_is_a_result_with_the_last_line_of_the_child(run: Run) -> None:
    results = run(check("crash"), check("a"))

    assert statuses(results) == {"crash": "fails", "a": "holds"}
    assert results[0].detail == "its process was killed by SIGABRT: synapse: fatal"


def test_a_check_without_its_requirements_is_unknown(run: Run) -> None:
    results = run(check("fail"), check("a", needs=("fail",)), check("b", num_ranks=2))

    assert statuses(results) == {"fail": "fails", "a": "unknown", "b": "unknown"}
    assert results[1].detail == "it needs fail"
    assert results[2].detail == "it needs 2 cards, found 1"


def test_a_check_of_two_ranks_holds_only_if_both_ranks_pass(run: Run) -> None:
    pair = [check("a", num_ranks=2), check("fail-on-rank-1", num_ranks=2)]

    results = run(*pair, num_cards=2)

    assert statuses(results) == {"a": "holds", "fail-on-rank-1": "fails"}


def test_a_rank_may_finish_its_checks_before_the_other_rank_begins(run: Run) -> None:
    assert statuses(run(check("late-on-rank-1", num_ranks=2), num_cards=2)) == {
        "late-on-rank-1": "holds"
    }


def test_no_check_runs_after_the_time_budget(run: Run) -> None:
    results = run(check("a"), check("b"), budget_s=0.0)

    assert statuses(results) == {"a": "unknown", "b": "unknown"}
    assert results[0].detail == "the time budget of 0 s was used up"


def test_a_card_that_is_still_busy_after_a_check_is_tried_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.01)
    busy = tmp_path / "busy"

    busy.touch()
    at_first = run(check("a"))
    results = run(check("fail"), check("a"))

    # A card that was already busy before the self-test is not waited for.
    assert statuses(at_first) == {"a": "unknown"}
    assert at_first[0].detail == "Device already acquired"
    assert statuses(results) == {"fail": "fails", "a": "holds"}
