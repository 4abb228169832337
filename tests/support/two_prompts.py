"""Requests through a worker with few buckets: two prompts, one in a single chunk and one in two
chunks, and random traffic."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tiny_models import VOCAB_SIZE
from worker_rig import WorkerRig

from config.buckets import BucketConfig, Range

TABLE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(2, 2, 2),
    prompt_query=Range(64, 64, 64),
    prompt_context=Range(0, 32, 32),
    decode_batch=Range(2, 2, 2),
    decode_blocks=Range(32, 32, 32),
)
LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 128, "max_model_len": 128}
"""Launch limits: they add a bucket to TABLE for the longest prompt; the sampler has a single width.
"""
SLICE = {"num_blocks": 32}
"""Setting for a model with states: without prefix caching a decode reads all blocks as a slice,
and the largest decode bucket of TABLE has 32 blocks."""
WIDE = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512}
PROMPTS = ([3, 5, 7, 9, 11] * 9, [8, 1, 2])


@contextmanager
def working(folder: Path, **settings: Any) -> Iterator[WorkerRig]:
    rig = WorkerRig(folder, steps=(2, 64, 32), **{"buckets": TABLE, **LIMITS, **settings})
    try:
        yield rig
    finally:
        rig.worker.close()


def working_wide(folder: Path, **settings: Any) -> AbstractContextManager[WorkerRig]:
    """`working` with capacity for more and longer requests."""
    return working(folder, **{**WIDE, **settings})


def greedy(rig: WorkerRig, count: int = 12) -> list[list[int]]:
    """Tokens of two prompts, the longer prompt in two chunks (the second over cached context), and
    of decodes."""
    for req_index, prompt in enumerate(PROMPTS):
        rig.admit(req_index, prompt)
    rig.prefill({0: 40, 1: None})
    rig.step()
    rig.prefill({0: None})
    rig.step()
    for _ in range(count):
        rig.decode([0, 1])
        rig.step()
    return [rig.free(req_index) for req_index in range(len(PROMPTS))]


def random_traffic(
    rig: WorkerRig, rounds: int = 3, *, max_chunk: int = 64, shares: bool = True
) -> list[list[int]]:
    """The tokens of random requests, two at a time: both prompts in chunks of at most `max_chunk`
    tokens, then decodes of either request or both. The second prompt begins with the first tokens
    of the first prompt, and shares its full blocks unless `shares` is False."""
    luck = random.Random(7)
    found = []
    for _ in range(rounds):
        first = [luck.randrange(VOCAB_SIZE) for _ in range(luck.randint(2, 60))]
        rig.admit(0, first)
        _prefill_in_chunks(rig, 0, len(first), max_chunk, luck)
        second = [*first[: luck.randint(1, len(first))], 5, 6]
        rig.admit(1, second, shared_with=0 if shares else None)
        _prefill_in_chunks(rig, 1, len(second), max_chunk, luck)
        rig.run(luck.choice([[0], [1], [0, 1]]), luck.randint(1, 6))
        found += [rig.free(0), rig.free(1)]
    return found


def _prefill_in_chunks(
    rig: WorkerRig, req_index: int, length: int, max_chunk: int, luck: random.Random
) -> None:
    while (left := length - rig.requests[req_index].computed) > 0:
        rig.prefill({req_index: min(left, luck.randint(1, max_chunk))})
        rig.step()
