"""Expert-parallel engines: the same launches on all engines, and no launches without work."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from counting_worker import counting_executor
from delays import least
from engine_rig import asking, counting_config, prompt_of
from ports import free_port
from waits import WAIT_S, wait_for

from config.data_parallel import DataParallelConfig
from config.engine import EngineConfig
from config.errors import ConfigError, EngineDied
from config.parallel import ParallelConfig
from engine.core.coupled_steps import JOINED, DPCoordinator, HubClient, StepCollector
from engine.core.loop import EngineLoop
from engine.transport.channels import SocketDirectory, endpoint, new_token
from engine.transport.messages import (
    SLEEP,
    Abort,
    AddRequest,
    Control,
    FromEngine,
    Ready,
    Reply,
    StepOutput,
)
from engine.transport.step_messages import (
    AgreedStep,
    JoinSteps,
    StepCall,
    StepProposal,
    StepsRefused,
)
from hpu.protocol import PREFILL, Bucket, StepPlan

NUM_ENGINES = 2
STEP_S = 0.001
"""Duration of a plan on the device."""
DECODE_BUCKET: Bucket = (1, 2, 1, 8)


def config(**more: Any) -> EngineConfig:
    return dataclasses.replace(
        counting_config(),
        data_parallel=DataParallelConfig(data_parallel_size=NUM_ENGINES),
        parallel=ParallelConfig(enable_expert_parallel=True),
        **more,
    )


def test_the_first_proposal_wakes_other_engines_and_the_last_sends_the_agreed_step() -> None:
    steps = StepCollector(3)
    first, others = StepProposal(0, [DECODE_BUCKET]), StepProposal(0, [])
    agreed = AgreedStep(0, [[], [DECODE_BUCKET], []])

    assert steps.take(1, first) == [(0, StepCall(0)), (2, StepCall(0))]
    assert steps.take(2, others) == []
    assert steps.take(0, others) == [(0, agreed), (1, agreed), (2, agreed)]
    assert steps.take(0, StepProposal(1, []))[0] == (1, StepCall(1))


def test_engines_join_only_with_equal_settings() -> None:
    together, apart = StepCollector(2), StepCollector(2)

    assert together.take(1, JoinSteps(1, 7)) == apart.take(1, JoinSteps(1, 7)) == []
    joined = together.take(0, JoinSteps(0, 7))
    refused = apart.take(0, JoinSteps(0, 8))

    assert joined == [(0, AgreedStep(JOINED, [])), (1, AgreedStep(JOINED, []))]
    assert all(isinstance(answer, StepsRefused) for _, answer in refused)
    assert "engine 1 has other settings" in str(refused)


class Engine:
    """An engine on a thread, with an executor without devices."""

    def __init__(self, number: int, hub: str, token: str, settings: EngineConfig) -> None:
        self.plans: list[StepPlan] = []
        self.messages: list[FromEngine] = []
        self.error: BaseException | None = None
        self.loop = EngineLoop(settings, self._emit, num_front_ends=1, engine=number)
        self._number = number
        self._settings = settings
        self._hub, self._token = hub, token
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(self, key: int, num_tokens: int, num_prompt_tokens: int = 3) -> None:
        prompt = memoryview(prompt_of(*range(num_prompt_tokens)))
        self.loop.receive(0, AddRequest(key, prompt, asking(num_tokens)))

    def tokens(self, key: int) -> list[int]:
        found = []
        for output in self.outputs:
            counts = output.counts or [1] * len(output.keys)
            tokens = iter(output.tokens)
            for other, count in zip(output.keys, counts, strict=True):
                part = [next(tokens) for _ in range(count)]
                found += part if other == key else []
        return found

    def has_finished(self, key: int) -> bool:
        return any(finish.key == key for output in self.outputs for finish in output.finished)

    @property
    def outputs(self) -> list[StepOutput]:
        return [item for item in list(self.messages) if isinstance(item, StepOutput)]

    @property
    def is_ready(self) -> bool:
        return self.error is not None or any(
            isinstance(message, Ready) for message in self.messages
        )

    @property
    def buckets(self) -> list[list[Bucket]]:
        """Buckets of the launches of each plan."""
        return [
            [(launch.phase, *launch.bucket) for launch in plan.launches]
            for plan in list(self.plans)
        ]

    def stop(self) -> None:
        self.loop.stop(EngineDied("the test is over"))
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _emit(self, front_end: int | None, message: FromEngine) -> None:
        self.messages.append(message)

    def _run(self) -> None:
        executor: Any = counting_executor(self._settings)
        send = executor.send
        done_s = 0.0

        def watch(plan: StepPlan) -> None:
            nonlocal done_s
            self.plans.append(plan)
            done_s = time.monotonic() + STEP_S
            send(plan)

        executor.send = watch
        executor.has_result = lambda: time.monotonic() >= done_s
        group = HubClient(self._hub, self._token, self.loop.stopped)
        try:
            group.join(self._number, self._settings)
            self.loop.run(executor, group=group)
        except (ConfigError, EngineDied) as error:
            self.error = error
        finally:
            group.close()


def start_engines(*settings: EngineConfig) -> Iterator[list[Engine]]:
    directory, token = SocketDirectory(), new_token()
    names = [endpoint(directory.path, f"steps{number}") for number in range(len(settings))]
    hub = DPCoordinator(names, token)
    started = [
        Engine(number, name, token, item)
        for number, (name, item) in enumerate(zip(names, settings, strict=True))
    ]
    wait_for(lambda: all(engine.is_ready for engine in started))
    yield started
    for engine in started:
        engine.stop()
    hub.close()
    directory.close()


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    yield from start_engines(config(), config())


def test_an_idle_engine_joins_the_launches_of_a_busy_engine_and_idle_engines_launch_nothing(
    engines: list[Engine],
) -> None:
    busy, idle = engines

    for key in range(5):
        busy.ask(key, 4 + key)
    wait_for(lambda: all(busy.has_finished(key) for key in range(5)))
    wait_for(lambda: len(idle.plans) == len(busy.plans))
    num_plans, num_messages = len(busy.plans), len(idle.messages)

    def idle_cpu_s() -> float:
        begun_s = time.process_time()
        time.sleep(0.4)
        return time.process_time() - begun_s

    cpu_s = least(idle_cpu_s, 0.2)

    assert [busy.tokens(key) for key in range(5)] == [list(range(4 + key)) for key in range(5)]
    assert busy.buckets == idle.buckets and all(busy.buckets)
    assert not any(launch.req_indices for plan in idle.plans for launch in plan.launches)
    # Only the stats of its start may be sent; an empty step sends no message.
    assert num_messages == len(idle.messages) and len(idle.outputs) <= 1
    assert len(busy.plans) == len(idle.plans) == num_plans
    assert cpu_s < 0.2


def test_requests_of_both_engines_and_late_ones_run_in_common_buckets(
    engines: list[Engine],
) -> None:
    first, second = engines

    first.ask(1, 40, num_prompt_tokens=700)
    first.ask(2, 500)
    wait_for(lambda: len(first.tokens(2)) > 3)
    second.ask(3, 30, num_prompt_tokens=900)
    wait_for(lambda: len(second.tokens(3)) > 3)
    first.loop.receive(0, Abort([2]))
    second.ask(4, 20)
    for engine, key in ((first, 1), (second, 3), (second, 4)):
        wait_for(lambda engine=engine, key=key: engine.has_finished(key))  # type: ignore[misc]
    wait_for(lambda: len(first.plans) == len(second.plans))

    assert first.tokens(1) == list(range(40)) and len(first.tokens(2)) < 500
    assert (second.tokens(3), second.tokens(4)) == (list(range(30)), list(range(20)))
    assert first.buckets == second.buckets
    together = [
        [bool(launch.req_indices) for plan in engine.plans for launch in plan.launches]
        for engine in engines
    ]
    assert any(first and other for first, other in zip(*together, strict=True))
    assert any(bucket[0] == PREFILL for step in first.buckets[4:] for bucket in step)
    padding = [engine.outputs[-1].stats for engine in engines]
    assert all(stats is not None and sum(stats.padding_tokens.values()) for stats in padding)


def test_coupled_engines_do_not_sleep(engines: list[Engine]) -> None:
    engines[0].loop.receive(0, Control(1, SLEEP))
    wait_for(lambda: any(isinstance(message, Reply) for message in engines[0].messages))

    (reply,) = (message for message in engines[0].messages if isinstance(message, Reply))
    assert reply.is_refusal and "cannot sleep" in str(reply.error)


def test_engines_with_different_settings_are_refused() -> None:
    with contextlib.contextmanager(start_engines)(config(), config(seed=1)) as engines:
        wait_for(lambda: all(engine.error is not None for engine in engines))

    assert all(isinstance(engine.error, ConfigError) for engine in engines)
    assert "engine 1 has other settings than engine 0" in str(engines[0].error)


def test_an_engine_that_waits_for_other_engines_can_be_stopped() -> None:
    directory, token = SocketDirectory(), new_token()
    names = [endpoint(directory.path, f"steps{number}") for number in range(2)]
    hub = DPCoordinator(names, token)

    alone = Engine(0, names[0], token, config())
    time.sleep(0.1)
    alone.stop()

    assert str(alone.error) == "the test is over"
    hub.close()
    directory.close()


def test_a_remote_hub_requires_its_token_and_its_loss_ends_the_engine() -> None:
    directory, token, remote = SocketDirectory(), new_token(), new_token()
    names = [endpoint(directory.path, "steps0"), f"tcp://127.0.0.1:{free_port()}"]
    hub = DPCoordinator(names, token, remote)

    refused = Engine(1, names[1], token, config())
    wait_for(lambda: refused.is_ready)
    engines = [Engine(0, names[0], token, config()), Engine(1, names[1], remote, config())]
    wait_for(lambda: all(engine.is_ready for engine in engines))
    engines[1].ask(1, 5)
    wait_for(lambda: engines[1].has_finished(1))
    engines[0].stop()
    hub.close()
    wait_for(lambda: engines[1].error is not None)

    assert isinstance(refused.error, ConfigError)
    assert str(refused.error) == (f"{names[1]} refused the token: all hosts need the same token")
    assert str(engines[1].error) == f"{names[1]} has disconnected"
    assert engines[1].tokens(1) == list(range(5))
    directory.close()
