"""Engines that share experts (dp with --enable-expert-parallel): the tokens of one process under
unequal load, no work when idle, and one end for all."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from live import alive
from parity import SHORT_OF_BLOCKS
from tiny_models import make_tiny

from config.errors import ConfigError, EngineDied
from gaudiserve import LLM, SamplingParams

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(200)]

COUPLED: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=120)
PROMPTS = [[7 * i % 290 + 8 for i in range(length)] for length in (60, 3, 1, 33, 9, 50, 2)]
END_S = 5.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("mixtral", tmp_path_factory.mktemp("tiny"), seed=3))


def raw(prompt: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in prompt)


async def read(queue: Any) -> list[int]:
    tokens: list[int] = []
    while True:
        update = await queue.get()
        tokens += update.tokens
        if update.finish is not None:
            return tokens


async def uneven(llm: LLM) -> list[list[int]]:
    """Five requests to engine 0 and none to engine 1; then late ones there, and an abort."""
    first, second = llm._client.engines
    early = [first.add(raw(prompt), GREEDY) for prompt in PROMPTS[:5]]
    aborted = first.add(raw(PROMPTS[0]), LONG)
    await early[1].get()
    late = [second.add(raw(prompt), GREEDY) for prompt in PROMPTS[5:]]
    first.abort([aborted.key])
    return [
        *(await asyncio.gather(*map(read, early[:1] + early[2:]))),
        *(await asyncio.gather(*map(read, late))),
    ]


def cpu_s(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(words[11]) + int(words[12])
    return total / os.sysconf("SC_CLK_TCK")


def test_unequal_load_gives_the_tokens_of_one_process_and_a_killed_engine_ends_all(
    folder: str,
) -> None:
    with LLM(folder, **SHORT_OF_BLOCKS) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False
        )
        expected = [list(output.outputs[0].token_ids) for output in outputs]

    with LLM(folder, **SHORT_OF_BLOCKS, **COUPLED) as llm:
        processes = llm._client._processes.processes  # type: ignore[attr-defined]
        pids = [process.pid for process in processes.values()]

        found = llm._background.run(uneven(llm))
        time.sleep(0.5)
        before = cpu_s(pids)
        time.sleep(1.0)
        idle_s = cpu_s(pids) - before

        assert found == [expected[0], *expected[2:]]
        assert idle_s < 0.1

        ends, seconds = llm._background.run(kill(llm, pids[1]))

        assert seconds < END_S
        assert all(isinstance(end, EngineDied) for end in ends), ends
        assert {str(end) for end in ends} == {
            "engine 1 has ended, and the others with it, since they share experts: engine 1 "
            f"(process {pids[1]}) was killed by SIGKILL"
        }
        end_s = time.monotonic() + END_S
        while any(map(alive, pids)):
            assert time.monotonic() < end_s
            time.sleep(0.02)


async def kill(llm: LLM, victim: int) -> tuple[list[Any], float]:
    """What requests on both engines end with when `victim` is killed, and after how long."""
    queues = [engine.add(raw(PROMPTS[1]), LONG) for engine in llm._client.engines]
    for queue in queues:
        await queue.get()
    os.kill(victim, 9)
    start = time.monotonic()
    ends = await asyncio.gather(*map(read, queues), return_exceptions=True)
    return ends, time.monotonic() - start


def test_models_without_experts_and_numbers_that_do_not_divide_are_refused(
    folder: str, tmp_path: Path
) -> None:
    dense = str(make_tiny("llama", tmp_path / "llama"))

    with pytest.raises(ConfigError, match="has no experts that could be distributed over ranks"):
        LLM(dense, **SHORT_OF_BLOCKS, **COUPLED)
    with pytest.raises(ConfigError, match=r"has 4 experts, and 3 \(--data-parallel-size 3 x"):
        LLM(folder, **SHORT_OF_BLOCKS, **{**COUPLED, "data_parallel_size": 3})
