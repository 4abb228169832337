"""Sleep and wake-up of an engine: its requests, its cached prefixes and its messages to the
worker."""

import pytest
from core_rig import CoreRig, CoreSettings
from counting_worker import NO_MEMORY, counting_command

from config.engine import EngineConfig
from config.errors import RequestFailed, UserError
from engine.executors.multiproc import MultiprocExecutor
from engine.executors.worker_launcher import LocalLauncher
from engine.transport.messages import SLEEP, WAKE_UP, EngineStats
from hpu.protocol import SLEEP as WORKER_SLEEP
from hpu.protocol import WAKE_WEIGHTS, WarmupProgress

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
LONG = {"max_tokens": 20, "ignore_eos": True}


def state(rig: CoreRig) -> str:
    return rig.core.stats().sleep


def test_open_requests_fail_with_a_retry_hint_when_the_engine_sleeps() -> None:
    rig = CoreRig(CoreSettings(max_num_seqs=1))
    rig.add(0, PROMPT, **LONG)
    rig.add(1, PROMPT, **LONG)
    rig.run(steps=3)

    asleep = rig.core.control(SLEEP, {"level": 1})

    finished = {f.key: f for _, message in rig.core.step() for f in message.finished}
    assert asleep == state(rig) == "weights_offloaded"
    assert [finished[key].is_retryable for key in (0, 1)] == [True, True]
    assert rig.executor.calls == [(WORKER_SLEEP, 1)]
    rig.core.check()


def test_a_sleeping_engine_refuses_requests_and_serves_again_after_wake_up() -> None:
    rig = CoreRig()
    rig.add(0, PROMPT, **LONG)
    rig.run()
    rig.core.control(SLEEP, {"level": 2})
    rig.add(1, PROMPT, **LONG)
    told = [f for _, message in rig.core.step() for f in message.finished]

    awake = rig.core.control(WAKE_UP, {})
    rig.add(2, PROMPT, **LONG)
    rig.run()

    assert [(f.key, f.is_retryable) for f in told] == [(1, True)]
    assert awake == state(rig) == "awake"
    rig.check_output(2)
    # No prefix survived the sleep, and requests from before the sleep are not freed again.
    assert rig.plans[-1].freed_requests == []
    assert [new.num_computed_tokens for plan in rig.plans for new in plan.new_requests] == [0, 0]


def test_mode_wait_sleeps_once_no_request_is_open() -> None:
    rig = CoreRig()
    rig.add(0, PROMPT, **LONG)
    rig.run(steps=2)

    first = rig.core.control(SLEEP, {"mode": "wait"})
    rig.add(1, PROMPT)
    rig.run()

    rig.check_output(0)
    assert (first, state(rig)) == ("falling_asleep", "weights_offloaded")
    assert rig.executor.calls == [(WORKER_SLEEP, 1)]


def test_wake_up_cancels_a_pending_sleep() -> None:
    rig = CoreRig()
    rig.add(0, PROMPT, **LONG)
    rig.run(steps=2)
    rig.core.control(SLEEP, {"mode": "wait"})

    rig.core.control(WAKE_UP, {})
    rig.add(1, PROMPT, **LONG)
    rig.run()

    assert state(rig) == "awake" and rig.executor.calls == []
    rig.check_output(0)
    rig.check_output(1)


def test_wake_up_tags_restore_parts_and_the_deepest_sleep_level_is_reported() -> None:
    rig = CoreRig()
    rig.core.control(SLEEP, {"level": 1})
    rig.core.control(SLEEP, {"level": 2})
    rig.core.control(SLEEP, {"level": 1})

    part = rig.core.control(WAKE_UP, {"tags": ["weights"]})
    between = state(rig)
    whole = rig.core.control(WAKE_UP, {"tags": ["kv_cache"]})

    assert (part, between, whole) == ("discard_all", "discard_all", "awake")
    assert rig.executor.calls == [(WORKER_SLEEP, 1), (WORKER_SLEEP, 2), (WAKE_WEIGHTS, 0)]


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        (SLEEP, {"level": 3}, "level is 3, it must be 1 or 2"),
        (SLEEP, {"mode": "keep"}, "mode is 'keep', it must be abort or wait"),
        (WAKE_UP, {"tags": ["lora"]}, "tags has 'lora', it must be weights or kv_cache"),
    ],
)
def test_impossible_sleep_controls_are_refused(
    name: str, arguments: dict[str, object], error: str
) -> None:
    rig = CoreRig()

    with pytest.raises(UserError) as caught:
        rig.core.control(name, arguments)

    assert caught.value.message == error
    assert rig.core.stats() == EngineStats(blocks_total=64)


def test_a_worker_process_reports_its_progress_during_wake_up(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    told: list[WarmupProgress] = []
    executor = worker_process("", tmp_path_factory)
    ready = executor.start(told.append)
    executor.call(WORKER_SLEEP, 1)
    told.clear()

    again = executor.wake_up()

    executor.close()
    assert again == ready
    assert told == [WarmupProgress("warmup", 1, 2), WarmupProgress("warmup", 1, 1)]


def test_a_worker_process_reports_a_failed_wake_up_and_survives(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    executor = worker_process("no_memory=1", tmp_path_factory)
    executor.start(lambda progress: None)
    executor.call(WORKER_SLEEP, 1)

    with pytest.raises(RequestFailed, match=NO_MEMORY):
        executor.wake_up()

    answer = executor.call(WAKE_WEIGHTS)
    executor.close()
    assert answer == ""


def worker_process(manners: str, folders: pytest.TempPathFactory) -> MultiprocExecutor:
    return MultiprocExecutor(
        EngineConfig(model=f"counting:{manners}"),
        LocalLauncher(str(folders.mktemp("s")), counting_command("worker")),
        lambda death: None,
    )
