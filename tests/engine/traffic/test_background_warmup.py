"""Background warm-up on a strict emulated card: requests between its buckets compile nothing, and
nothing compiles after its end."""

import time
from pathlib import Path

import torch
from slow_model import Ledger, raw
from tiny_models import make_tiny

from config.buckets import BucketConfig, Range
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.execution import EmulatorSettings, WarmupConfig
from config.params.sampling import SamplingParams
from engine.core.build import build_core
from engine.core.loop import make_table
from engine.executors.inproc import InprocExecutor
from engine.transport.messages import AddRequest
from hpu.worker.worker import Worker

WATCHED = ("compilations", "captures", "fallbacks", "ungraphed")
TABLE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(1, 1, 1),
    prompt_query=Range(32, 32, 64),
    prompt_context=Range(0, 8, 8),
    decode_batch=Range(1, 1, 2),
    decode_blocks=Range(8, 8, 16),
)


def test_requests_between_the_buckets_of_a_background_warm_up_compile_nothing(
    tmp_path: Path,
) -> None:
    config = EngineConfig(
        str(make_tiny("llama", tmp_path)),
        device="hpu-emulator",
        dtype="float32",
        num_threads=1,
        max_model_len=128,
        cache=CacheConfig(block_size=16, num_blocks=16),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_prefill_batch=1),
        buckets=TABLE,
        warmup=WarmupConfig(mode="background"),
        emulator=EmulatorSettings(is_strict=True),
    )
    executor = InprocExecutor(Worker(config))
    ready = executor.start(lambda progress: None)
    core = build_core(config, executor, ready, make_table(config, ready), time.monotonic)
    counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]  # the emulator's
    ledger = Ledger()
    graphs = [counts["captures"]]

    for key in range(20):
        sampling = SamplingParams(
            temperature=key % 2,
            seed=key,
            max_tokens=3,
            top_p=0.9,
            logprobs=key % 3,
            ignore_eos=True,
        )
        before = [counts[name] for name in WATCHED]
        ledger.open(key)
        core.add_request(AddRequest(key, raw([5 + key] * (1 + 6 * key)), sampling), [])
        while core.has_work:
            ledger.take(core.step())
        assert [counts[name] for name in WATCHED] == before
        core.warm_up_next()
        core.step()
        graphs.append(counts["captures"])

    executor.close()
    assert ready.num_deferred > 1
    assert core.num_deferred == 0
    assert graphs == sorted(graphs) and graphs[-1] == graphs[0] + ready.num_deferred
    assert all(request.finish is not None for request in ledger.requests.values())
