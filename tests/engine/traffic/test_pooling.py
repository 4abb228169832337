"""Pooling requests on a strict emulated card: after warm-up, nothing is compiled, captured, waited
for or run on the host, and all vectors equal the CPU's."""

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_model import raw
from tiny_encoders import make_pooling, write_modules
from tiny_models import VOCAB_SIZE
from watched_executor import WATCHED, WatchedExecutor

from config.buckets import BucketConfig, Range
from config.engine import EngineConfig, SchedulerConfig
from config.execution import EmulatorSettings
from config.params.pooling import PoolingParams
from config.params.sampling import SamplingParams
from engine.core.build import build_core
from engine.core.engine_core import EngineCore
from engine.core.loop import make_table
from engine.transport.messages import AddRequest

REQUESTS = 40
TABLE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(1, 2, 4),
    prompt_query=Range(32, 32, 64),
    prompt_context=Range(0, 1, 0),
)
EMULATED = {
    "device": "hpu-emulator",
    "buckets": TABLE,
    "emulator": EmulatorSettings(is_strict=True, memory_bytes=1 << 30),
}


def serve(folder: Path, **settings: Any) -> tuple[dict[int, bytes], list[int]]:
    """Vectors of requests of all kinds, by key, and the card's counters during the traffic."""
    schedule = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=128, max_prefill_batch=4)
    config = EngineConfig(
        str(folder),
        dtype="float32",
        num_threads=1,
        max_model_len=64,
        scheduler=schedule,
        pooler_config='{"is_matryoshka": true}',
        **{"device": "cpu", **settings},
    )
    executor = WatchedExecutor(config)
    ready = executor.start(lambda progress: None)
    core = build_core(config, executor, ready, make_table(config, ready), time.monotonic)
    card = getattr(getattr(torch, "hpu", None), "emulated", None)
    before = [card.counters.counts[name] for name in WATCHED] if card else []
    vectors = traffic(core)
    after = [card.counters.counts[name] for name in WATCHED] if card else []
    assert core.stats().useful_tokens["prefill"] > 0
    executor.close()
    return vectors, [new - old for new, old in zip(after, before, strict=True)]


def traffic(core: EngineCore) -> dict[int, bytes]:
    rng = random.Random(11)
    waiting, vectors = list(range(REQUESTS)), {}
    for _ in range(1000):
        if waiting and rng.random() < 0.7:
            tokens = [rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randint(2, 64))]
            params = PoolingParams(
                task=rng.choice(["embed", "embed", "token_embed"]),
                dimensions=rng.choice([None, 8]),
                normalize=rng.choice([None, True, False]),
                num_skipped=rng.choice([0, 1]),
            )
            core.add_request(
                AddRequest(waiting.pop(), raw(tokens), SamplingParams(), pooling=params), []
            )
        for _, message in core.step():
            vectors.update((key, bytes(data)) for key, _, data in message.vectors)
        core.check()
        if not waiting and not core.has_work:
            return vectors
    raise AssertionError("1000 steps were not enough")


@pytest.mark.parametrize(
    "family", ["xlm-roberta", pytest.param("nomic_bert", marks=pytest.mark.slow), "qwen3"]
)
def test_pooling_after_warmup_compiles_nothing_and_equals_the_cpu(
    family: str, tmp_path: Path
) -> None:
    folder = make_pooling(family, tmp_path)
    pooling = {"pooling_mode": ["mean", "lasttoken"]}
    write_modules(folder, "Transformer", "Pooling", "Normalize", pooling=pooling)
    expected, _ = serve(folder)

    found, counted = serve(folder, **EMULATED)

    assert counted == [0] * len(WATCHED)
    assert found.keys() == expected.keys() == set(range(REQUESTS))
    for key, data in expected.items():
        want = np.frombuffer(data, "<f4")
        np.testing.assert_allclose(np.frombuffer(found[key], "<f4"), want, atol=1e-4)
