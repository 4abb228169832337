"""A worker's parts, each made from what was made before it: the model with its weights, the split
of the memory, the buckets, the runner. Knows no plans."""

import gc
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from config.buckets import BucketConfig
from config.checkpoint.safetensors_files import folder_shapes
from config.engine import EngineConfig
from config.errors import ConfigError
from config.model.model_config import ModelConfig
from config.params.pooling import PoolingFacts
from config.startup_checks import choose_context
from hpu.backends.base import Backend
from hpu.backends.host import usable_memory
from hpu.bucketing.bucket_table import BucketTable
from hpu.bucketing.limits import BucketLimits
from hpu.model_loader.loader import load_weights
from hpu.model_loader.size_estimate import activation_bytes, rotary_peak_bytes
from hpu.models.base import CausalLM
from hpu.models.registry import build_model
from hpu.profiling.counters import Counters
from hpu.protocol import WarmupProgress
from hpu.quantization.registry import process_weights, select_quantization
from hpu.runner.batch_state import BatchState
from hpu.runner.graph_cache import GraphCache
from hpu.runner.input_buffers import InputBufferPool, InputBuffers
from hpu.runner.kv_cache import KVCache, block_bytes, reads_contiguously
from hpu.runner.model_runner import ModelRunner
from hpu.runner.step_runner import StepRunner
from hpu.sampling.logprobs import LogprobsMode
from hpu.sampling.sampler import Sampler
from hpu.warmup import report as announce
from hpu.worker.memory import GIB, FreeMemory, KVCacheDemand, MemorySplit, split_memory
from hpu.worker.offloaded_weights import Kept, put_back
from hpu.worker.profile_run import largest_buckets, measure_launches

logger = logging.getLogger(__name__)


class OnDevice(Protocol):
    """A model on its device, from which a worker's other parts are built: at start, and again each
    time it has slept."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """What holds the weights."""
        ...

    def build(self, counters: Counters, *, num_blocks: int | None = None) -> "Built":
        """Everything up to the warm-up. `num_blocks` of a KV cache, if there is one; None: as the
        settings say, or what fits. Raises ConfigError when it does not fit."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A generating model on its device, and the facts that everything else is made by."""

    config: EngineConfig
    backend: Backend
    facts: ModelConfig
    model: CausalLM
    dtype: torch.dtype
    max_model_len: int
    block_size: int
    weight_bytes: int
    load_s: float

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.model,)

    def build(self, counters: Counters, *, num_blocks: int | None = None) -> "Built":
        if num_blocks is None:
            return _build(self, counters)
        cache = replace(self.config.cache, num_blocks=num_blocks)
        return _build(replace(self, config=replace(self.config, cache=cache)), counters)

    @property
    def captures(self) -> bool:
        """Whether launches are captured."""
        return self.backend.captures and not self.config.enforce_eager

    @property
    def buckets(self) -> BucketConfig:
        """How the table is made, with the device's own strategy where none was named."""
        return named_strategy(self.config, self.backend)

    @property
    def pads(self) -> bool:
        """Whether launches are padded to buckets."""
        return self.buckets.strategy != "exact"

    @property
    def contiguous(self) -> bool:
        """Whether decodes read the cache as one slice."""
        return reads_contiguously(self.config, self.backend)

    @property
    def wanted(self) -> KVCacheDemand:
        """What the KV cache has to serve."""
        return KVCacheDemand(
            block_size=self.block_size,
            block_bytes=block_bytes(self.model, self.block_size, self.dtype),
            max_model_len=self.max_model_len,
            max_num_seqs=self.config.scheduler.max_num_seqs,
        )

    def table(self, num_blocks: int) -> BucketTable:
        """The buckets over a cache of so many blocks."""
        schedule = self.config.scheduler
        limits = BucketLimits(
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            max_prefill_batch=schedule.prefill_batch(),
            num_blocks=num_blocks,
            prefix_caching=self.config.cache.enable_prefix_caching,
        )
        return BucketTable.make(self.buckets, limits)


@dataclass(frozen=True, slots=True)
class Built:
    """What a worker needs for its life, whatever its model gives."""

    runner: StepRunner
    graphs: GraphCache
    staging: InputBufferPool[Any]
    cache: KVCache | None
    """None where nothing is cached."""
    table: BucketTable
    strategy: str
    facts: ModelConfig
    dtype: torch.dtype
    max_model_len: int
    block_size: int
    weight_bytes: int
    load_s: float
    contiguous: bool = False
    """Whether decodes read the cache as one slice."""
    pooling: PoolingFacts | None = None


def _build(loaded: Loaded, counters: Counters) -> Built:
    backend = loaded.backend
    sampler = make_sampler(loaded)
    found = find_memory(loaded, sampler)
    parts = split(loaded, found)
    runner, graphs, staging, cache = make_runner(
        loaded,
        sampler,
        counters,
        num_blocks=parts.num_blocks,
        captures=loaded.captures,
        graph_bytes=parts.graph_bytes,
    )
    # More blocks may have been asked for than were planned.
    left = max(0, backend.memory()[0] - found.reserve)
    graphs.budget_bytes = min(graphs.budget_bytes, left)
    return Built(
        runner=runner,
        graphs=graphs,
        staging=staging,
        cache=cache,
        table=loaded.table(parts.num_blocks),
        strategy=loaded.buckets.strategy,
        facts=loaded.facts,
        dtype=loaded.dtype,
        max_model_len=loaded.max_model_len,
        block_size=loaded.block_size,
        weight_bytes=loaded.weight_bytes,
        load_s=loaded.load_s,
        contiguous=loaded.contiguous,
    )


def load(
    config: EngineConfig,
    facts: ModelConfig,
    backend: Backend,
    on_progress: Callable[[WarmupProgress], None],
    kept: Kept | None = None,
) -> Loaded:
    """The model with its weights, from the checkpoint unless they were `kept`. Raises ConfigError
    when the checkpoint, the device and the settings do not fit each other."""
    # Few bits are multiplied in bfloat16.
    asked = config.dtype if config.quantization is None else "bfloat16"
    dtype = choose_dtype(asked, facts.dtype, backend)
    max_model_len = choose_context(config, facts, None)
    logger.info("Device %s, %s, context %d", backend.name, name_of(dtype), max_model_len)
    start = time.perf_counter()
    if kept is None:
        check_memory(facts, backend, dtype, max_model_len)
    decoder = build_model(
        facts,
        dtype=dtype,
        device=backend.device,
        max_model_len=max_model_len,
        quantization=select_quantization(config, dtype, backend.device),
    )
    if kept is None:
        load_weights(
            decoder,
            config.model,
            on_progress=lambda done, total: on_progress(WarmupProgress("load", done, total)),
        )
    else:
        put_back(kept, (decoder,))
    weight_bytes = process_weights(decoder, config.quantization)
    weight_bytes += sum(
        tensor.numel() * tensor.element_size()
        for tensor in (*decoder.parameters(), *decoder.buffers())
    )
    model = backend.prepare(decoder)
    assert isinstance(model, CausalLM), "a decoder stays a decoder"
    if reads_contiguously(config, backend):
        model.read_contiguously()
    seconds = time.perf_counter() - start
    logger.info("Weights: %.2f GiB in %.1f s", weight_bytes / GIB, seconds)
    return Loaded(
        config,
        backend,
        facts,
        model,
        dtype,
        max_model_len,
        config.cache.block_size or backend.default_block_size,
        weight_bytes,
        seconds,
    )


def check_memory(
    facts: ModelConfig, backend: Backend, dtype: torch.dtype, max_model_len: int
) -> None:
    """Raise ConfigError for weights, or a context, larger than all memory: before they are
    allocated, because some systems allocate what they do not have, and then kill."""
    shapes = folder_shapes(Path(facts.path))
    weights = sum(map(math.prod, shapes.values())) * dtype.itemsize
    if weights > (total := backend.memory()[1]):
        raise ConfigError(
            f"the weights in {facts.path} take {weights / GIB:.1f} GiB, {backend.name} has "
            f"{total / GIB:.1f} GiB"
        )
    if facts.encoder is not None:
        return
    rotary, host = rotary_peak_bytes(facts, max_model_len), usable_memory()[1]
    if rotary > host:
        raise ConfigError(
            f"the rotary table for {max_model_len} tokens takes {rotary / GIB:.1f} GiB to make, "
            f"this machine has {host / GIB:.1f} GiB: set a smaller --max-model-len"
        )


def make_sampler(loaded: Loaded) -> Sampler:
    """With static shapes where a new shape means a compilation; one request more than an engine
    uses."""
    backend = loaded.backend
    return Sampler(
        loaded.config.scheduler.max_num_seqs + 1,
        loaded.facts.vocab_size,
        backend,
        LogprobsMode.named(loaded.config.logprobs_mode),
        static_shapes=loaded.pads and (loaded.captures or backend.compiles),
    )


def make_runner(
    loaded: Loaded,
    sampler: Sampler,
    counters: Counters,
    *,
    num_blocks: int,
    captures: bool,
    graph_bytes: int,
) -> tuple[ModelRunner, GraphCache, InputBufferPool[InputBuffers], KVCache]:
    """A runner over a cache of so many blocks, and the parts of it that a warm-up works on. The
    last row is the runner's own."""
    backend, model = loaded.backend, loaded.model
    cache = KVCache(
        model, backend, num_blocks=num_blocks, block_size=loaded.block_size, dtype=loaded.dtype
    )
    graphs = GraphCache(model, backend, counters, captures=captures, budget_bytes=graph_bytes)
    staging = InputBufferPool(backend, InputBuffers)
    rows = BatchState(
        loaded.config.scheduler.max_num_seqs + 1,
        loaded.max_model_len,
        loaded.block_size,
        pad_block=num_blocks,
        contiguous=loaded.contiguous,
    )
    runner = ModelRunner(
        model,
        backend,
        rows,
        sampler,
        cache,
        graphs,
        staging,
        counters,
        vocab_size=loaded.facts.vocab_size,
        pads=loaded.pads,
    )
    return runner, graphs, staging, cache


def find_memory(loaded: Loaded, sampler: Sampler) -> FreeMemory:
    """What is free now that the weights are there, and what the largest launches take of it:
    measured on a cache of one block, or estimated where the back end counts no memory."""
    backend, schedule = loaded.backend, loaded.config.scheduler
    if backend.peak_memory() is None or not loaded.pads:
        reserve = activation_bytes(
            loaded.facts,
            num_cards=1,
            width=loaded.dtype.itemsize,
            num_tokens=schedule.max_num_batched_tokens,
            num_seqs=schedule.max_num_seqs,
        )
        return FreeMemory(backend.memory()[0], reserve, is_measured=False)
    start = time.perf_counter()
    within = max(2, backend.memory()[0] // loaded.wanted.block_bytes)
    # A slice of the cache is no copy of it, and cannot be longer than the one block there is.
    buckets = largest_buckets(loaded.table(within), 1 if loaded.contiguous else within)
    runner, *_ = make_runner(
        loaded, sampler, Counters(), num_blocks=1, captures=False, graph_bytes=0
    )
    reserve = measure_launches(runner, backend, buckets)
    del runner
    gc.collect()
    logger.info(
        "Profile: the largest launches, %s, ran in %.1f s",
        " and ".join(str(bucket[1:]) for bucket in buckets),
        time.perf_counter() - start,
    )
    return FreeMemory(backend.memory()[0], reserve)


def split(loaded: Loaded, found: FreeMemory) -> MemorySplit:
    """The memory's parts, told to the operator. Raises ConfigError when a context does not fit."""
    config, backend = loaded.config, loaded.backend
    share = config.warmup.graph_memory_fraction if loaded.captures else 0.0
    wanted = loaded.wanted
    parts = split_memory(
        config.cache,
        wanted,
        found,
        shares_host_memory=backend.shares_host_memory,
        graph_memory_fraction=share,
    )
    if not backend.shares_host_memory:
        announce.tell_memory(parts, config.cache, found, config.warmup)
    announce.tell_cache(parts, config.cache, wanted)
    return parts


def named_strategy(config: EngineConfig, backend: Backend) -> BucketConfig:
    """How the table is made, with the device's own strategy where none was named."""
    if config.buckets.strategy == "auto":
        return replace(config.buckets, strategy=backend.default_strategy)
    return config.buckets


def choose_dtype(asked: str, checkpoint: str, backend: Backend) -> torch.dtype:
    """What was asked for; for `auto` the checkpoint's own if it runs well here, else the best."""
    if asked != "auto":
        return _dtype(asked)
    own = _dtype(checkpoint)
    return own if own in backend.fast_dtypes else backend.default_dtype


def name_of(dtype: torch.dtype) -> str:
    """bfloat16, not torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype {name!r} is not one of bfloat16, float16, float32")
    return found
