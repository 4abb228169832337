"""Profiles, sleep and a killed worker with several workers, offline and behind a server."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from engine_rig import request_of
from live import alive, own_workers, workers_of
from parity import SHORT_OF_BLOCKS, answers, difference
from tiny_models import make_tiny

from config.errors import EngineDied
from gaudiserve import LLM, SamplingParams

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(200)]

LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
KILLED_S = 30.0
"""Maximum wait of requests after a worker was killed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("tiny"), seed=3))


def control(llm: LLM, name: str, **arguments: Any) -> Any:
    return llm._background.run(llm._client.control(name, **arguments))


def wait_until_gone(pids: list[int]) -> None:
    end_s = time.monotonic() + KILLED_S
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end_s, [pid for pid in pids if alive(pid)]
        time.sleep(0.02)


async def _answer_and_kill(llm: LLM, victim: int, num_requests: int) -> tuple[list[Any], float]:
    """The end of each of several long requests when the process `victim` is killed while they run,
    and the seconds until the last end."""
    prompts = [bytes([10 + index, 0, 0, 0]) for index in range(num_requests)]
    queues = [llm._client.add(request_of(prompt, LONG)) for prompt in prompts]
    for queue in queues:
        await queue.get()
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()

    async def read(queue: Any) -> Any:
        while True:
            update = await queue.get()
            if update.finish is not None:
                return update.finish.reason

    ends = await asyncio.gather(*map(read, queues), return_exceptions=True)
    return ends, time.monotonic() - start


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_two_ranks_are_profiled_sleep_and_wake_up_and_end_together(
    kind: str, folder: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    two = {f"{kind}_parallel_size": 2}
    with LLM(folder, **SHORT_OF_BLOCKS, **two, profiler_trace=str(trace)) as llm:
        control(llm, "stop_profile")
        first, second = (json.loads(file.read_text()) for file in sorted(tmp_path.iterdir()))
        assert first["traceEvents"] and second["traceEvents"]
        assert sorted(file.name for file in tmp_path.iterdir()) == [
            "trace.json",
            "trace.rank1.json",
        ]

        named = control(llm, "start_profile")
        before = answers(llm)
        assert control(llm, "stop_profile") == named
        assert f"-{own_workers()[0]}-" in named, "it is rank 0's"
        assert json.loads(Path(named).read_text())["traceEvents"]
        for level in (1, 2):
            assert control(llm, "sleep", level=level) != "awake"
            with pytest.raises(Exception, match="sleeps"):
                llm.generate([{"prompt_token_ids": [9]}], LONG, use_tqdm=False)
            assert control(llm, "wake_up", tags=[]) == "awake"
            assert difference(answers(llm), before) == ""

        workers = workers_of(os.getpid())
        assert len(workers) == 2
        ends, seconds = llm._background.run(_answer_and_kill(llm, sorted(workers)[0], 3))

        assert seconds < KILLED_S
        assert all(isinstance(end, EngineDied) for end in ends), ends
        assert "worker 0" in str(ends[0]) and "was killed by SIGKILL" in str(ends[0])
        wait_until_gone(workers)


@pytest.mark.parametrize(
    ("stages", "shards", "victim"),
    [(2, 1, 1), (2, 2, 0)],
    ids=["pp 2, its last stage", "tp 2 x pp 2, a rank of its first stage"],
)
def test_a_killed_rank_of_a_pipeline_ends_all_stages(
    stages: int, shards: int, victim: int, folder: str
) -> None:
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": shards}
    with LLM(folder, **SHORT_OF_BLOCKS, **sizes) as llm:
        workers = own_workers()
        assert len(workers) == stages * shards

        ends, seconds = llm._background.run(_answer_and_kill(llm, workers[victim], 3))

        assert seconds < KILLED_S
        assert all(isinstance(end, EngineDied) for end in ends), ends
        assert {str(end) for end in ends} == {
            f"worker {victim} (process {workers[victim]}) was killed by SIGKILL"
        }
        wait_until_gone(workers)


def test_a_killed_worker_ends_its_engine_and_the_other_engine_continues(folder: str) -> None:
    with LLM(folder, **SHORT_OF_BLOCKS, tensor_parallel_size=2, data_parallel_size=2) as llm:
        family = workers_of(os.getpid())
        engines = {pid: workers_of(pid) for pid in family if len(workers_of(pid)) == 2}
        assert len(engines) == 2
        (first, lost), (second, kept) = engines.items()

        ends, seconds = llm._background.run(_answer_and_kill(llm, lost[1], 4))

        assert seconds < KILLED_S
        assert sum(isinstance(end, EngineDied) for end in ends) == 2, ends
        assert ends.count("length") == 2, ends
        wait_until_gone([first, *lost])
        assert alive(second) and all(map(alive, kept))
        (output,) = llm.generate([{"prompt_token_ids": [9]}], LONG, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 120

        ends, seconds = llm._background.run(_answer_and_kill(llm, kept[0], 2))

        assert seconds < KILLED_S
        assert all(isinstance(end, EngineDied) for end in ends), ends
        wait_until_gone(family)
        with pytest.raises(EngineDied):
            llm.generate([{"prompt_token_ids": [9]}], LONG, use_tqdm=False)
