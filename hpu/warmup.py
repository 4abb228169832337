"""Warm-up: every prepared bucket once before the first request. Knows no sequences."""

import logging
import time
from collections.abc import Callable

import numpy as np

from hpu.runner import Runner
from hpu.sampler import Sampler
from hpu.staging import Bucket
from hpu.step import DECODE, PREFILL, RowSampling, WarmupProgress

logger = logging.getLogger(__name__)

FIRST_QUERY = 16
"""Tokens of the one prefill that warms an exact table."""

GREEDY = RowSampling(temperature=0.0)
DRAWN = RowSampling(top_k=2, top_p=0.5)


def warm_up(
    runner: Runner,
    sampler: Sampler,
    buckets: list[Bucket],
    on_progress: Callable[[WarmupProgress], None],
) -> float:
    """Run every bucket once, and every batch size once more with a draw; gives the seconds.

    Without buckets (an exact table) one small prefill and one decode run. Decodes come first,
    largest first, so that they get what memory there is for graphs; then prefills. No row may be
    live.
    """
    start = time.perf_counter()
    order = sorted(buckets or [(PREFILL, 1, FIRST_QUERY, 0), (DECODE, 1, 1, 1)], key=_turn)
    smallest = {batch: (phase, batch, query, blocks) for phase, batch, query, blocks in order}
    work = [(bucket, GREEDY) for bucket in order] + [(b, DRAWN) for b in smallest.values()]
    on_progress(WarmupProgress("warmup", 0, len(work)))
    for done, (bucket, sampling) in enumerate(work, start=1):
        sampler.admit(0, sampling, np.zeros(1, np.uint32), 1)
        runner.warm(bucket)
        sampler.release(0)
        on_progress(WarmupProgress("warmup", done, len(work)))
    seconds = time.perf_counter() - start
    logger.info("Warm-up: %d buckets in %.1f s", len(order), seconds)
    return seconds


def _turn(bucket: Bucket) -> tuple[int, int]:
    phase, batch, query, blocks = bucket
    return (phase != DECODE, -(batch * query + blocks))
