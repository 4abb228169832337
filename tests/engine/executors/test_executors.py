"""Executors with real worker processes: order, deaths, errors, and the choice of an executor."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from counting_worker import REFUSAL, counting_command
from engine_rig import counting_config
from live import ROOT, alive

from config.engine import EngineConfig
from config.errors import ConfigError, EngineDied, UserError
from engine.executors import multiproc
from engine.executors.base import IDLE_S
from engine.executors.inproc import InprocExecutor
from engine.executors.multiproc import MultiprocExecutor
from engine.executors.select import make_executor
from engine.executors.worker_launcher import LocalLauncher
from hpu.protocol import (
    DECODE,
    PREFILL,
    GrammarMasks,
    Launch,
    NewRequest,
    RequestSampling,
    StepPlan,
    WarmupProgress,
)


def executor_of(
    manners: str, directory: object, deaths: list[EngineDied] | None = None, **group: int
) -> MultiprocExecutor:
    return MultiprocExecutor(
        counting_config(manners),
        LocalLauncher(str(directory), counting_command("worker")),
        (deaths if deaths is not None else []).append,
        **group,
    )


def plan_of(step: int) -> StepPlan:
    """One new sequence of two tokens in a row and a block of its own."""
    new = NewRequest(step, memoryview(b"\1\0\0\0\2\0\0\0"), 2, 0, [step], RequestSampling())
    return StepPlan(step, [Launch(PREFILL, (1, 2, 0), [step], [2], [True])], new_requests=[new])


def test_plans_that_are_in_flight_together_come_back_in_order(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    executor = executor_of("", tmp_path_factory.mktemp("s"))
    progress: list[WarmupProgress] = []
    executor.start(progress.append)

    executor.submit(plan_of(0))
    executor.submit(plan_of(1))
    results = [executor.collect(), executor.collect()]
    pid = executor.pids[0]
    executor.close()
    executor.close()

    assert [result.step for result in results] == [0, 1]
    assert [stage.stage for stage in progress] == ["load", "warmup"]
    assert not alive(pid)


def test_an_idle_worker_prepares_what_was_left_and_tells_it_between_results(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    executor = executor_of("later=3", tmp_path_factory.mktemp("s"))
    ready = executor.start(lambda progress: None)
    executor.submit(plan_of(0))
    executor.collect()

    warmed: list[int] = []
    deadline = time.monotonic() + 10
    while len(warmed) < 3 and time.monotonic() < deadline:
        warmed += [item.num_deferred for item in executor.take_warmed()]
        time.sleep(0.01)
    executor.submit(plan_of(1))
    result = executor.collect()
    executor.close()

    assert (ready.num_deferred, warmed, result.step) == (3, [2, 1, 0], 1)
    assert not executor.warm_up_next()


def test_ranks_that_wait_for_each_other_are_named_with_their_buckets(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(multiproc, "STALLED_S", 0.2)
    executor = executor_of("hangs=1.5", tmp_path_factory.mktemp("s"), num_workers=2)

    executor.start(lambda progress: None)
    executor.close()

    text = "worker 0: prompt bucket (1, 16, 0); worker 1: prompt bucket (2, 16, 0)"
    assert any(message.endswith(text) for message in caplog.messages)


def test_a_worker_killed_while_collect_waits_is_noticed_at_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    deaths: list[EngineDied] = []
    executor = executor_of("step_s=30", tmp_path_factory.mktemp("s"), deaths)
    executor.start(lambda progress: None)
    executor.submit(plan_of(0))
    threading.Timer(0.2, os.kill, (executor.pids[0], signal.SIGKILL)).start()
    began = time.monotonic()

    with pytest.raises(EngineDied, match=r"worker 0 \(process \d+\) was killed by SIGKILL"):
        executor.collect()

    assert time.monotonic() - began < 1.2
    executor.close()
    assert len(deaths) == 1 and "SIGKILL" in str(deaths[0])


def test_a_worker_that_cannot_start_is_quoted(tmp_path_factory: pytest.TempPathFactory) -> None:
    executor = executor_of("refuse=1", tmp_path_factory.mktemp("s"))

    with pytest.raises(ConfigError) as caught:
        executor.start(lambda progress: None)
    executor.close()

    assert str(caught.value) == REFUSAL


def test_a_closed_executor_reports_no_death(tmp_path_factory: pytest.TempPathFactory) -> None:
    deaths: list[EngineDied] = []
    executor = executor_of("", tmp_path_factory.mktemp("s"), deaths)
    executor.start(lambda progress: None)

    executor.close()
    time.sleep(0.1)

    assert deaths == []


def test_on_a_cpu_the_worker_lives_in_the_engines_process_unless_asked_otherwise(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = str(tmp_path_factory.mktemp("s"))

    chosen = make_executor(EngineConfig(model="m", device="cpu"), directory, lambda death: None)
    asked = make_executor(
        EngineConfig(model="m", device="cpu", executor="mp"), directory, lambda death: None
    )

    asked.close()
    assert isinstance(chosen, InprocExecutor)
    assert isinstance(asked, MultiprocExecutor)


def test_where_a_runtime_is_installed_auto_gives_the_worker_a_process_and_says_why_its_mode(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path_factory.mktemp("s")
    (folder / "habana_frameworks").mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    caplog.set_level(logging.INFO)

    executor = make_executor(EngineConfig(model="m"), str(folder), lambda death: None)

    executor.close()
    assert isinstance(executor, MultiprocExecutor)
    assert "torch-compile, since HPU graphs need the vendor's build of torch" in caplog.text


@pytest.mark.parametrize(
    ("device", "variable", "word"),
    [("hpu", "PT_HPU_LAZY_MODE", "0"), ("cpu", "GOMP_SPINCOUNT", "1000")],
)
def test_a_worker_in_this_process_finds_its_runtimes_variables_when_torch_is_imported(
    device: str, variable: str, word: str
) -> None:
    program = f"""
import os, sys
from config.engine import EngineConfig
from engine.executors.select import make_executor

class Watch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            sys.exit(os.environ["{variable}"])

sys.meta_path.insert(0, Watch())
make_executor(EngineConfig("m", device="{device}", executor="uni"), "", print)
"""
    own = (variable, "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in own}

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.stderr.splitlines()[-1] == word


def test_a_call_is_answered_between_plans_whose_results_still_come_in_order(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    executor = executor_of("step_s=0.05", tmp_path_factory.mktemp("s"))
    executor.start(lambda progress: None)
    executor.submit(plan_of(0))
    executor.submit(plan_of(1))

    answer = executor.call("start_profile")
    with pytest.raises(UserError, match="was called before") as refused:
        executor.call("start_profile")
    steps = [executor.collect().step, executor.collect().step]
    executor.close()

    assert answer == "start_profile after 2 plans"
    assert refused.value.code == "twice"
    assert steps == [0, 1]


def masked_plans() -> tuple[StepPlan, StepPlan, GrammarMasks]:
    """A row's first token and its second, whose mask comes behind the plan; only 4 and 3 may."""
    new = NewRequest(
        0, memoryview(b"\1\0\0\0\2\0\0\0"), 2, 0, [0], RequestSampling(temperature=0.0, masked=True)
    )
    masks = [memoryview(bytes([1 << token, *bytes(627)])) for token in (4, 3)]
    first = StepPlan(0, [Launch(PREFILL, (1, 2, 0), [0], [2], [True])], [new])
    first.masked_requests, first.masks = [0], masks[0]
    second = StepPlan(1, [Launch(DECODE, (1, 1, 1), [0])], deferred_requests=[0])
    return first, second, GrammarMasks(1, [0], masks[1])


def test_a_worker_that_waits_for_masks_hands_up_what_is_done_and_answers_calls_meanwhile(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    first, second, masks = masked_plans()
    executor = executor_of("later=1", tmp_path_factory.mktemp("s"))
    executor.start(lambda progress: None)

    executor.submit(first)
    executor.submit(second)
    tokens = executor.collect().tokens
    answer = executor.call("start_profile")
    time.sleep(2 * IDLE_S)
    is_early, warmed = executor.has_result(), executor.take_warmed()
    executor.submit_masks(masks)
    tokens += executor.collect().tokens
    executor.close()

    assert answer == "start_profile after 2 plans"
    assert (is_early, warmed) == (False, [])
    assert tokens == [4, 3]


def test_a_worker_that_waits_for_masks_leaves_when_it_is_told_to(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    first, second, _ = masked_plans()
    deaths: list[EngineDied] = []
    executor = executor_of("", tmp_path_factory.mktemp("s"), deaths)
    executor.start(lambda progress: None)
    executor.submit(first)
    executor.submit(second)
    executor.collect()
    began = time.monotonic()

    executor.close()

    assert time.monotonic() - began < 2
    assert not alive(executor.pids[0])
    assert deaths == []


@pytest.mark.parametrize("output_rank", [0, 1])
def test_a_group_of_workers_runs_every_plan_and_one_of_them_sends_the_results(
    output_rank: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("s")
    executor = executor_of("later=2", directory, num_workers=2, output_rank=output_rank)
    progress: list[WarmupProgress] = []
    executor.start(progress.append)

    for step in range(3):
        executor.submit(plan_of(step))
    results = [executor.collect() for _ in range(3)]
    answer = executor.call("start_profile")
    with pytest.raises(UserError, match="start_profile was called before"):
        executor.call("start_profile")
    time.sleep(2 * IDLE_S)
    untold = executor.take_warmed()
    has_more = [executor.warm_up_next() for _ in range(2)]
    warmed = executor.take_warmed()
    pids = executor.pids
    executor.close()

    assert [result.step for result in results] == [0, 1, 2]
    # An answer behind the results of all plans comes from a worker that ran them.
    assert answer == "start_profile after 3 plans"
    # They do not warm up by themselves: all must run the same launches in the same order.
    assert (untold, has_more) == ([], [True, False])
    assert [entry.num_deferred for entry in warmed] == [1, 0]
    assert len(progress) == 2 and len(set(pids)) == 2
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_death_in_a_group_is_noticed_at_once_and_reported_once(
    rank: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    deaths: list[EngineDied] = []
    executor = executor_of("step_s=60", tmp_path_factory.mktemp("s"), deaths, num_workers=2)
    executor.start(lambda progress: None)
    executor.submit(plan_of(0))
    threading.Timer(0.2, os.kill, (executor.pids[rank], signal.SIGKILL)).start()

    start = time.monotonic()
    with pytest.raises(EngineDied, match=f"worker {rank} .* was killed by SIGKILL"):
        executor.collect()
    waited_s = time.monotonic() - start
    executor.close()

    assert waited_s < 2
    assert len(deaths) == 1 and f"worker {rank} " in str(deaths[0])


def test_a_follower_that_fails_is_quoted(tmp_path_factory: pytest.TempPathFactory) -> None:
    executor = executor_of("crash_at=1", tmp_path_factory.mktemp("s"), num_workers=2, output_rank=1)
    executor.start(lambda progress: None)
    executor.submit(plan_of(0))
    assert executor.collect().step == 0

    executor.submit(plan_of(1))
    with pytest.raises(EngineDied, match=r"worker [01]: ValueError: step 1 is one too many"):
        executor.collect()
    executor.close()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_block_that_any_rank_finds_wrong_is_wrong(
    rank: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every rank has its part of a block, and only one sends the results of other plans."""
    executor = executor_of(f"corrupt={rank}", tmp_path_factory.mktemp("s"), num_workers=3)
    executor.start(lambda progress: None)
    corrupt = []
    for step in range(4):
        plan = plan_of(step)
        if step % 2:
            plan.loaded_slots, plan.loaded_blocks = [0], [5]
        executor.submit(plan)
        corrupt.append(executor.collect().corrupt_loads)
    executor.close()

    assert corrupt == [[], [0], [], [0]]
