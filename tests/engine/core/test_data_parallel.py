"""Engine behavior with several engines or several front ends."""

import dataclasses
import time
from typing import Any

from counting_worker import counting_executor
from engine_rig import asking, counting_config, prompt_of

from config.data_parallel import DataParallelConfig
from engine.core.build import build_core
from engine.core.coupled_steps import StepSync
from engine.core.loop import EngineLoop, make_table
from engine.kv_cache.prefix_hashes import block_hashes
from engine.transport.messages import AddRequest, FromEngine, PromptBlocks
from hpu.protocol import StepPlan


def announced(num_engines: int, num_front_ends: int) -> list[tuple[int | None, FromEngine]]:
    """Messages to front ends about a prompt that the first front end sent."""
    config = dataclasses.replace(
        counting_config(), data_parallel=DataParallelConfig(data_parallel_size=num_engines)
    )
    heard: list[tuple[int | None, FromEngine]] = []
    loop = EngineLoop(
        config, lambda *message: heard.append(message), num_front_ends=num_front_ends, engine=1
    )
    loop._block_size = 16
    loop.receive(0, AddRequest(1, memoryview(prompt_of(*range(40))), asking(1), cache_salt="s"))
    return heard


def test_other_front_ends_are_informed_of_a_prompt() -> None:
    message = PromptBlocks(block_hashes(prompt_of(*range(40)), 16, "s"))

    assert len(message.hashes) == 2
    assert announced(2, 3) == [(1, message), (2, message)]
    assert announced(2, 1) == []
    assert announced(1, 3) == []


def test_engines_draw_different_seeds_for_requests_without_a_seed() -> None:
    assert len({first_seed(engine) for engine in (0, 1, 2)}) == 3
    assert first_seed(1) == first_seed(1)


def first_seed(engine: int) -> int:
    config, plans = counting_config(), []
    executor: Any = counting_executor(config)
    worker = executor.start(lambda progress: None)
    send = executor.send

    def watch(plan: StepPlan) -> None:
        plans.append(plan)
        send(plan)

    executor.send = watch
    core = build_core(
        config, executor, worker, make_table(config, worker), time.monotonic, sync=StepSync(engine)
    )
    core.add_request(AddRequest(1, memoryview(prompt_of(1, 2)), asking(1)), [])
    core.step()
    return int(plans[0].new_requests[0].sampling.seed)
