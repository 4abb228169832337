"""Executors with real worker processes: order of results, crashes, errors, and the choice of an
executor."""

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
from waits import WAIT_S

from config.engine import EngineConfig
from config.errors import ConfigError, EngineDied, UserError
from engine.executors import multiproc
from engine.executors.base import Executor
from engine.executors.inproc import InprocExecutor
from engine.executors.multiproc import MultiprocExecutor
from engine.executors.select import make_executor
from engine.executors.worker_launcher import LocalLauncher, check_cards_per_host
from engine.transport.channels import Waiter
from hpu.protocol import (
    DECODE,
    PREFILL,
    WARM_UP_NEXT,
    FromWorker,
    GrammarMasks,
    Launch,
    NewRequest,
    RequestSampling,
    StepPlan,
    StepResult,
    WarmedBuckets,
    WarmupProgress,
    WorkerCall,
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


def next_result(executor: Executor) -> StepResult:
    (result,) = executor.receive(waits=True)
    assert isinstance(result, StepResult)
    return result


def plan_of(step: int) -> StepPlan:
    """A new sequence of two tokens, with its own request index and block."""
    new = NewRequest(step, memoryview(b"\1\0\0\0\2\0\0\0"), 2, 0, [step], RequestSampling())
    return StepPlan(step, [Launch(PREFILL, (1, 2, 0), [step], [2], [True])], new_requests=[new])


def test_results_of_plans_in_flight_arrive_in_order(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    executor = executor_of("", tmp_path_factory.mktemp("s"))
    progress: list[WarmupProgress] = []
    executor.start(progress.append)

    executor.send(plan_of(0))
    executor.send(plan_of(1))
    results = [next_result(executor), next_result(executor)]
    pid = executor.pids[0]
    executor.close()
    executor.close()

    assert [result.step for result in results] == [0, 1]
    assert [stage.stage for stage in progress] == ["load", "warmup"]
    assert not alive(pid)


def test_a_worker_prepares_a_bucket_per_call_and_accepts_plans_at_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    executor = executor_of("later=2", tmp_path_factory.mktemp("s"))
    ready = executor.start(lambda progress: None)
    received: list[FromWorker] = []

    for step in range(3):
        executor.send(WorkerCall(WARM_UP_NEXT))
        executor.send(plan_of(step))
        while len(received) < 2 * (step + 1):
            received += executor.receive(waits=True)
    executor.close()

    warmed = [item.num_deferred for item in received if isinstance(item, WarmedBuckets)]
    results = [item.step for item in received if isinstance(item, StepResult)]
    # The last call finds no bucket to prepare.
    assert (ready.num_deferred, warmed, results) == (2, [1, 0, 0], [0, 1, 2])


def test_a_message_received_during_a_call_is_kept_and_a_later_message_wakes_a_waiter(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    executor = executor_of("", tmp_path_factory.mktemp("s"))
    executor.start(lambda progress: None)
    executor.send(WorkerCall(WARM_UP_NEXT))

    # The answer arrives after the message about the bucket.
    executor.call("start_profile")
    is_ready = bool(Waiter(*executor.pollables).wait(0.0))
    received = executor.receive()
    executor.send(plan_of(0))
    is_announced = bool(Waiter(*executor.pollables).wait(WAIT_S))
    (result,) = executor.receive()
    executor.close()

    assert (is_ready, received) == (False, [WarmedBuckets([], 0)])
    assert is_announced and isinstance(result, StepResult)


def test_stalled_ranks_are_logged_with_their_buckets(
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


def test_a_worker_killed_while_receive_waits_is_noticed_at_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    deaths: list[EngineDied] = []
    executor = executor_of("step_s=30", tmp_path_factory.mktemp("s"), deaths)
    executor.start(lambda progress: None)
    executor.send(plan_of(0))
    threading.Timer(0.2, os.kill, (executor.pids[0], signal.SIGKILL)).start()
    began = time.monotonic()

    with pytest.raises(EngineDied, match=r"worker 0 \(process \d+\) was killed by SIGKILL"):
        executor.receive(waits=True)

    # The step would take 30 s.
    assert time.monotonic() - began < 15
    executor.close()
    assert len(deaths) == 1 and "SIGKILL" in str(deaths[0])


def test_the_error_of_a_worker_that_cannot_start_is_reported(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
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


def test_a_cpu_worker_runs_in_the_engine_process_by_default(
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


def test_with_a_runtime_auto_starts_a_worker_process_and_logs_the_reason_of_its_mode(
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
def test_an_in_process_worker_has_its_runtime_variables_when_torch_is_imported(
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


def test_a_call_between_plans_keeps_the_order_of_results(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    executor = executor_of("step_s=0.05", tmp_path_factory.mktemp("s"))
    executor.start(lambda progress: None)
    executor.send(plan_of(0))
    executor.send(plan_of(1))

    answer = executor.call("start_profile")
    with pytest.raises(UserError, match="was called before") as refused:
        executor.call("start_profile")
    steps = [next_result(executor).step, next_result(executor).step]
    executor.close()

    assert answer == "start_profile after 2 plans"
    assert refused.value.code == "twice"
    assert steps == [0, 1]


def masked_plans() -> tuple[StepPlan, StepPlan, GrammarMasks]:
    """Plans of a request's first and second token, and the mask of the second token, which is sent
    after its plan. The masks allow only token 4, then only token 3."""
    new = NewRequest(
        0, memoryview(b"\1\0\0\0\2\0\0\0"), 2, 0, [0], RequestSampling(temperature=0.0, masked=True)
    )
    masks = [memoryview(bytes([1 << token, *bytes(627)])) for token in (4, 3)]
    first = StepPlan(0, [Launch(PREFILL, (1, 2, 0), [0], [2], [True])], [new])
    first.masked_requests, first.masks = [0], masks[0]
    second = StepPlan(1, [Launch(DECODE, (1, 1, 1), [0])], deferred_requests=[0])
    return first, second, GrammarMasks(1, [0], masks[1])


def test_a_worker_that_waits_for_masks_sends_results_and_answers_calls(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    first, second, masks = masked_plans()
    executor = executor_of("", tmp_path_factory.mktemp("s"))
    executor.start(lambda progress: None)

    executor.send(first)
    executor.send(second)
    tokens = next_result(executor).tokens
    answer = executor.call("start_profile")
    early = executor.receive()
    executor.send(masks)
    tokens += next_result(executor).tokens
    executor.close()

    assert answer == "start_profile after 2 plans"
    assert early == []
    assert tokens == [4, 3]


def test_a_worker_that_waits_for_masks_can_be_stopped(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    first, second, _ = masked_plans()
    deaths: list[EngineDied] = []
    executor = executor_of("", tmp_path_factory.mktemp("s"), deaths)
    executor.start(lambda progress: None)
    executor.send(first)
    executor.send(second)
    next_result(executor)

    executor.close()

    # A worker that does not stop by itself is killed after STOP_TIMEOUT_S.
    assert executor._workers[0].child.poll() == 0
    assert not alive(executor.pids[0])
    assert deaths == []


@pytest.mark.parametrize("output_rank", [0, 1])
def test_a_group_of_workers_runs_every_plan_and_a_single_worker_sends_results(
    output_rank: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("s")
    executor = executor_of("later=2", directory, num_workers=2, output_rank=output_rank)
    progress: list[WarmupProgress] = []
    executor.start(progress.append)

    for step in range(3):
        executor.send(plan_of(step))
    results = [next_result(executor) for _ in range(3)]
    answer = executor.call("start_profile")
    with pytest.raises(UserError, match="start_profile was called before"):
        executor.call("start_profile")
    untold = executor.receive()
    for _ in range(2):
        executor.send(WorkerCall(WARM_UP_NEXT))
    warmed: list[FromWorker] = []
    while len(warmed) < 2:
        warmed += executor.receive(waits=True)
    pids = executor.pids
    executor.close()

    assert [result.step for result in results] == [0, 1, 2]
    # The answer follows the results of all plans, so it comes from a worker that ran them.
    assert answer == "start_profile after 3 plans"
    assert untold == []
    # One message per bucket, sent once all workers have prepared it.
    assert warmed == [WarmedBuckets([], 1), WarmedBuckets([], 0)]
    assert len(progress) == 2 and len(set(pids)) == 2
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_death_in_a_group_is_noticed_at_once_and_reported_once(
    rank: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    deaths: list[EngineDied] = []
    executor = executor_of("step_s=60", tmp_path_factory.mktemp("s"), deaths, num_workers=2)
    executor.start(lambda progress: None)
    executor.send(plan_of(0))
    threading.Timer(0.2, os.kill, (executor.pids[rank], signal.SIGKILL)).start()

    start = time.monotonic()
    with pytest.raises(EngineDied, match=f"worker {rank} .* was killed by SIGKILL"):
        executor.receive(waits=True)
    waited_s = time.monotonic() - start
    executor.close()

    assert waited_s < 20
    assert len(deaths) == 1 and f"worker {rank} " in str(deaths[0])


def test_the_error_of_a_failed_follower_is_reported(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    executor = executor_of("crash_at=1", tmp_path_factory.mktemp("s"), num_workers=2, output_rank=1)
    executor.start(lambda progress: None)
    executor.send(plan_of(0))
    assert next_result(executor).step == 0

    executor.send(plan_of(1))
    with pytest.raises(EngineDied, match=r"worker [01]: ValueError: step 1 is one too many"):
        executor.receive(waits=True)
    executor.close()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_block_is_bad_if_any_rank_finds_it_bad(
    rank: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every rank holds its part of a block, although only one rank sends the results of other
    plans."""
    executor = executor_of(f"corrupt={rank}", tmp_path_factory.mktemp("s"), num_workers=3)
    executor.start(lambda progress: None)
    corrupt = []
    for step in range(4):
        plan = plan_of(step)
        if step % 2:
            plan.loaded_slots, plan.loaded_blocks = [0], [5]
        executor.send(plan)
        corrupt.append(next_result(executor).corrupt_loads)
    executor.close()

    assert corrupt == [[], [0], [], [0]]


@pytest.mark.parametrize("hosts", ["a", "aaaa", "aabb", "abc", "aaabbb"])
def test_hosts_with_equally_many_cards_are_taken(hosts: str) -> None:
    check_cards_per_host(list(hosts))


@pytest.mark.parametrize("hosts", ["aab", "aaab", "abb", "aabbc"])
def test_hosts_with_different_numbers_of_cards_are_refused(hosts: str) -> None:
    with pytest.raises(ConfigError, match=f"a: {hosts.count('a')}, b: {hosts.count('b')}"):
        check_cards_per_host(list(hosts))
