"""Layers with weights in host memory: tokens equal a model that is entirely on the device, on a
strict emulated card, with less device memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_model import Ledger, raw
from tiny_models import VOCAB_SIZE, make_tiny
from watched_executor import WATCHED, WatchedExecutor

from config.buckets import BucketConfig, Range
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.errors import ConfigError
from config.execution import EmulatorSettings, ExecutionConfig
from config.model.read_config import read_model_config
from config.params.offload import OffloadConfig
from config.params.sampling import SamplingParams
from engine.core.build import build_core
from engine.core.engine_core import EngineCore
from engine.core.loop import make_table
from engine.executors.inproc import InprocExecutor
from engine.kv_cache.prefix_hashes import block_hashes
from engine.transport.messages import AddRequest
from hpu.gaudi_devices import GIB
from hpu.model_loader.size_estimate import layer_bytes
from hpu.offload.host_layers import freed_bytes
from hpu.offload.weight_streamer import WeightStreamer
from hpu.worker.load import LoadedModel

NUM_LAYERS = 7
TABLE = BucketConfig(
    strategy="linear",
    prompt_batch=Range(1, 1, 1),
    prompt_query=Range(32, 32, 32),
    prompt_context=Range(0, 6, 6),
    decode_batch=Range(3, 3, 3),
    decode_blocks=Range(18, 18, 18),
)
MAX_STEPS = 2000


def host_memory(folder: Path, num_layers: int) -> OffloadConfig:
    sizes = layer_bytes(read_model_config(folder), num_cards=1, width=4)
    return OffloadConfig(cpu_offload_gb=(num_layers + 0.5) * max(sizes) / GIB)


@contextmanager
def engine(folder: Path, offload: OffloadConfig, **settings: Any) -> Iterator[EngineCore]:
    config = EngineConfig(
        str(folder),
        dtype="float32",
        cache=CacheConfig(block_size=16, num_blocks=20),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=32, max_prefill_batch=1),
        max_model_len=96,
        offload=offload,
        **{
            "device": "hpu-emulator",
            "buckets": TABLE,
            "emulator": EmulatorSettings(is_strict=True, memory_bytes=4 << 30),
            **settings,
        },
    )
    executor = WatchedExecutor(config)
    try:
        ready = executor.start(lambda progress: None)
        yield build_core(config, executor, ready, make_table(config, ready), time.monotonic)
    finally:
        executor.close()


def ask(core: EngineCore, count: int = 6, first: int = 0) -> list[list[int]]:
    """Greedy tokens of concurrent requests."""
    ledger = Ledger()
    keys = range(first, first + count)
    for key in keys:
        tokens = [
            3 + (5 * i + 11 * (key - first)) % (VOCAB_SIZE - 3)
            for i in range(20 + 9 * (key - first))
        ]
        prompt = raw(tokens[:80])
        ledger.open(key)
        sampling = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        core.add_request(AddRequest(key, prompt, sampling), block_hashes(prompt, 16, ""))
    for _ in range(MAX_STEPS):
        ledger.take(core.step())
        core.check()
        if not core.has_work:
            break
    return [ledger.requests[key].tokens for key in keys]


def loaded_of(core: EngineCore) -> LoadedModel:
    executor = core._executor
    assert isinstance(executor, InprocExecutor)
    loaded = executor._worker.loaded
    assert loaded is not None
    return loaded


def ring_of(core: EngineCore) -> WeightStreamer:
    ring = loaded_of(core).weight_ring
    assert ring is not None
    return ring


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
    ],
)
def test_a_warm_card_copies_layers_and_gives_the_same_tokens(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path, num_hidden_layers=NUM_LAYERS)
    with engine(folder, OffloadConfig()) as core:
        expected = ask(core)
        whole = loaded_of(core).weight_bytes

    with engine(folder, host_memory(folder, 5)) as core:
        card = torch.hpu.emulated  # type: ignore[attr-defined]  # the emulator's
        before = {name: card.counters.counts[name] for name in WATCHED}
        found = ask(core)
        again = ask(core, first=100)
        after = {name: card.counters.counts[name] for name in WATCHED}
        ring = ring_of(core)
        kept = loaded_of(core).weight_bytes

    assert found == again == expected
    assert after == before
    # The largest even number of the 5 allowed layers, spread over the model; two layers at a time
    # are on the card.
    assert ring.indices == (0, 1, 3, 5)
    assert ring.host_bytes == 2 * ring.device_bytes
    assert whole - kept == ring.host_bytes - ring.device_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lazy", "eager", "torch-compile"])
def test_layers_are_also_copied_in_modes_without_graphs(mode: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, num_hidden_layers=NUM_LAYERS)
    settings = {"execution": ExecutionConfig(mode=mode)}
    with engine(folder, OffloadConfig(), **settings) as core:
        expected = ask(core, 2)

    with engine(folder, host_memory(folder, 4), **settings) as core:
        assert ask(core, 2) == expected
        assert ring_of(core).size == 4


def test_the_freed_memory_equals_the_plan(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, num_hidden_layers=NUM_LAYERS, intermediate_size=4096)
    sizes = layer_bytes(read_model_config(folder), num_cards=1, width=4)
    freed = 4 * max(sizes)

    # Eager mode, because graphs take memory too, and a model with streamed layers has more graphs.
    with engine(folder, OffloadConfig(), enforce_eager=True) as core:
        whole = loaded_of(core).weight_bytes
        free = loaded_of(core).backend.memory()[0]
    with engine(folder, host_memory(folder, 6), enforce_eager=True) as core:
        loaded, ring = loaded_of(core), ring_of(core)
        assert ring.size == 6
        assert whole - loaded.weight_bytes == freed_bytes(sizes, ring.indices) == freed
        assert loaded.backend.memory()[0] - free > freed // 2


@pytest.mark.slow
def test_a_sleep_changes_no_token_of_a_model_with_streamed_layers(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, num_hidden_layers=NUM_LAYERS)
    with engine(folder, host_memory(folder, 4)) as core:
        expected = ask(core, 3)
        core.control("sleep", {"level": 1})
        core.control("wake_up", {})

        assert ask(core, 3, first=50) == expected
        assert ring_of(core).size == 4


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        (
            "llama",
            {"device": "cpu", "num_threads": 1, "buckets": BucketConfig()},
            "in host memory already",
        ),
        ("deepseek_v3", {}, "latent attention"),
    ],
)
def test_unsupported_weight_offloading_is_refused_with_the_reason(
    family: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path)
    refused = pytest.raises(ConfigError, match=f"--cpu-offload-gb is 1 and .*{why}")
    with refused, engine(folder, OffloadConfig(cpu_offload_gb=1), **settings):
        raise AssertionError
