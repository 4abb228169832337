"""An engine whose KV cache is smaller than its conversations, to test copies of offloaded
blocks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from slow_model import Ledger, raw
from tiny_models import VOCAB_SIZE
from watched_executor import WatchedExecutor

from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.params.offload import OffloadConfig
from config.params.sampling import SamplingParams
from engine.core.build import build_core
from engine.core.engine_core import EngineCore
from engine.core.loop import make_table
from engine.kv_cache.copy_rates import CopyRates
from engine.kv_cache.prefix_hashes import block_hashes
from engine.transport.messages import AddRequest

BLOCK_SIZE = 16
LENGTH = 7 * BLOCK_SIZE + 3
TALKS = [
    [3 + (7 * i + i * i * talk + talk) % (VOCAB_SIZE - 3) for i in range(300)] for talk in range(4)
]
ROUNDS = 3
IN_MEMORY = OffloadConfig(kv_offloading_size=0.01)
MAX_REQUEST_S = 60.0


@contextmanager
def engine(
    folder: Path, offload: OffloadConfig, *, num_blocks: int = 16, **settings: Any
) -> Iterator[EngineCore]:
    """An engine whose cache holds at most two conversations of TALKS. Evicted blocks are
    always copied back: a model this small computes blocks about as fast as it copies them, so the
    faster method would change from run to run."""
    config = EngineConfig(
        str(folder),
        dtype="float32",
        num_threads=1,
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            kv_cache_dtype=settings.pop("kv_cache_dtype", "auto"),
        ),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64, max_prefill_batch=1),
        max_model_len=256,
        offload=offload,
        **settings,
    )
    executor = WatchedExecutor(config)
    try:
        ready = executor.start(lambda progress: None)
        core = build_core(config, executor, ready, make_table(config, ready), time.monotonic)
        with patch.multiple(CopyRates, loads=True, fetches=True):
            yield core
    finally:
        executor.close()


def ask(
    core: EngineCore, key: int, tokens: list[int], salt: str = "", max_tokens: int = 6
) -> tuple[list[int], int]:
    """(tokens, cached prompt tokens) of a greedy request without other requests."""
    ledger, prompt = Ledger(), raw(tokens)
    ledger.open(key)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    core.add_request(
        AddRequest(key, prompt, sampling, cache_salt=salt),
        block_hashes(prompt, BLOCK_SIZE, salt),
    )
    deadline_s = time.monotonic() + MAX_REQUEST_S
    while core.has_work or not ledger.is_over(key):
        assert time.monotonic() < deadline_s, f"request {key} has not ended"
        outputs = core.step()
        ledger.take(outputs)
        core.check()
        if not outputs:
            # Sleep, because the request may wait for blocks in files.
            time.sleep(0.0005)
    return ledger.requests[key].tokens, ledger.requests[key].num_cached


def converse(core: EngineCore, rounds: int = ROUNDS) -> list[tuple[list[int], int]]:
    """Answers of TALKS, which take turns and grow by some tokens per turn."""
    return [
        ask(core, turn * len(TALKS) + talk, TALKS[talk][: LENGTH + 9 * turn])
        for turn in range(rounds)
        for talk in range(len(TALKS))
    ]


def tokens_of(answers: list[tuple[list[int], int]]) -> list[list[int]]:
    return [tokens for tokens, _ in answers]
