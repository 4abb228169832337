"""Drafts on a device with its own memory: results that reach the host late are counted for their
own request."""

from collections.abc import Iterator

import numpy as np
import pytest
from tiny_models import make_tiny
from worker_rig import BLOCK_SIZE, WorkerRig

from config.buckets import BucketConfig, Range
from config.params.speculation import SpeculationConfig
from hpu.protocol import (
    DECODE,
    PREFILL,
    Launch,
    NewRequest,
    RequestSampling,
    StepPlan,
    StepResult,
)
from hpu.worker.worker import Worker

TABLE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(1, 1, 1),
    prompt_query=Range(32, 32, 32),
    prompt_context=Range(0, 1, 0),
    decode_batch=Range(1, 1, 1),
    decode_blocks=Range(8, 8, 8),
)
NGRAM = SpeculationConfig(
    speculative_config='{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
)
LOOP = RequestSampling(temperature=0.0, logit_bias=((7, 100.0),))
"""The same token repeated, so that its drafts are accepted."""
DRAWN = RequestSampling(temperature=0.9, seed=11)
FIRST = [7] * 9
SECOND = [30, 31, 32, 30, 31, 32, 30]
NUM_BLOCKS = 8
"""Blocks per request: enough for the decodes of these tests."""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = make_tiny("llama", tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)
    rig = WorkerRig(
        folder,
        buckets=TABLE,
        num_blocks=2 * NUM_BLOCKS,
        max_num_seqs=1,
        max_num_batched_tokens=32,
        device="hpu-emulator",
        max_model_len=64,
        speculation=NGRAM,
    )
    yield rig.worker
    rig.worker.close()


def start(
    step: int, tokens: list[int], sampling: RequestSampling, blocks: range, freed: list[int]
) -> StepPlan:
    """A plan that frees requests and prefills a prompt at index 0."""
    new = NewRequest(
        0, memoryview(np.array(tokens, "<u4").tobytes()), len(tokens), 0, list(blocks), sampling
    )
    launch = Launch(PREFILL, (1, 32, 0), [0], [len(tokens)], [True])
    return StepPlan(step, [launch], [new], freed_requests=freed)


def decode(step: int) -> StepPlan:
    return StepPlan(step, [Launch(DECODE, (1, 1, NUM_BLOCKS), [0])])


def run(worker: Worker, plan: StepPlan) -> StepResult:
    worker.submit(plan)
    return worker.collect()


def second_answer(worker: Worker, *, is_behind: bool) -> tuple[list[int], int]:
    """Tokens of a request that reuses the index of a first request, and the number of drafts that
    the first request's last decode accepted. Its result is collected before the index is reused or,
    with `is_behind`, afterwards."""
    run(worker, start(0, FIRST, LOOP, range(NUM_BLOCKS), []))
    for step in range(1, 4):
        run(worker, decode(step))
    worker.submit(decode(4))
    if not is_behind:
        last = worker.collect()
    worker.submit(start(5, SECOND, DRAWN, range(NUM_BLOCKS, 2 * NUM_BLOCKS), [0]))
    if is_behind:
        last = worker.collect()
    tokens = list(worker.collect().tokens)
    for step in range(6, 16):
        tokens += run(worker, decode(step)).tokens
    run(worker, StepPlan(16, [], freed_requests=[0]))
    return tokens, len(last.tokens)


def test_late_results_of_a_rank_are_not_counted_for_the_next_request_of_an_index(
    worker: Worker,
) -> None:
    expected, num_accepted = second_answer(worker, is_behind=False)

    found, num_accepted_late = second_answer(worker, is_behind=True)

    assert num_accepted == num_accepted_late > 1
    assert len(expected) > BLOCK_SIZE
    assert found == expected
