"""Worker: one device's life. Build, load, measure, warm up; then plans in, results out."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from config.engine import EngineConfig
from config.errors import ConfigError
from config.model import ModelConfig, read_model_config
from config.startup import choose_max_model_len
from hpu.backends.base import Backend
from hpu.backends.select import select_backend
from hpu.buckets import BucketLimits, BucketTable
from hpu.counters import Counters
from hpu.diagnostics import diagnostics_of
from hpu.graphs import Graphs
from hpu.kv_cache import KVCache, block_bytes, reads_contiguously
from hpu.loader import load_weights
from hpu.memory import GIB, Split, Wanted, split_memory
from hpu.models.decoder import Decoder
from hpu.models.select import build_model
from hpu.pending import PendingStep
from hpu.profiler import Profiler
from hpu.rows import Rows
from hpu.runner import Runner
from hpu.sampler import Sampler
from hpu.staging import Staging
from hpu.step import StepPlan, StepResult, Warmed, WarmupProgress, WorkerReady
from hpu.warmup import warm_up

logger = logging.getLogger(__name__)

Progress = Callable[[WarmupProgress], None]


class Worker:
    """One device. `start` once, then `submit` and `collect` in any order that never collects more
    than was submitted, then `close`. Not thread-safe."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._backend: Backend | None = None
        self._runner: Runner | None = None
        self._profiler: Profiler | None = None
        self._pending: deque[PendingStep] = deque()

    def start(self, on_progress: Progress) -> WorkerReady:
        """Everything before the first plan. Raises ConfigError when the checkpoint, the device and
        the settings do not fit each other."""
        with torch.inference_mode():
            return self._start(on_progress)

    def submit(self, plan: StepPlan) -> None:
        """Apply and launch a plan; does not wait for the device (a CPU runs it at once)."""
        assert self._runner is not None, "submit before start"
        with torch.inference_mode():
            self._pending.append(self._runner.submit(plan))

    def has_result(self) -> bool:
        """Whether `collect` would not wait."""
        return bool(self._pending) and self._pending[0].is_done()

    def collect(self) -> StepResult:
        """Wait for the oldest submitted plan, and give its result."""
        assert self._runner is not None and self._pending, "collect without a plan"
        with torch.inference_mode():
            return self._runner.collect(self._pending.popleft())

    def call(self, name: str) -> str:
        """Answer one of the calls of `hpu.profiler`. Raises UserError or RequestFailed."""
        assert self._profiler is not None, "call before start"
        return self._profiler.call(name)

    def idle(self) -> Warmed | None:
        """Prepare one of the buckets that were left for later; None when there is none. Only with
        nothing submitted."""
        return None

    def close(self) -> None:
        """Drop everything on the device and give it back; safe to call twice."""
        self._pending.clear()
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
        self._runner = None
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def _start(self, on_progress: Progress) -> WorkerReady:
        config = self._config
        backend = select_backend(config)
        self._backend = backend
        facts = read_model_config(config.model)
        dtype = choose_dtype(config.dtype, facts.dtype, backend)
        max_model_len = choose_max_model_len(config.max_model_len, facts)
        logger.info("Device %s, %s, context %d", backend.name, _name(dtype), max_model_len)

        model, weight_bytes, load_s = _load(
            config, facts, dtype, max_model_len, backend, on_progress
        )
        block_size = config.cache.block_size or backend.default_block_size
        split = _split(config, facts, model, dtype, backend, max_model_len, block_size)
        cache = KVCache(
            model, backend, num_blocks=split.num_blocks, block_size=block_size, dtype=dtype
        )
        logger.info(
            "KV cache: %d blocks of %d tokens, %.2f GiB",
            cache.num_blocks,
            block_size,
            cache.bytes / GIB,
        )
        contiguous = reads_contiguously(config, backend)
        if contiguous:
            model.read_contiguously()
        table = _table(config, backend, max_model_len, block_size, split.num_blocks)
        counters = Counters()
        captures = backend.captures and not config.enforce_eager
        graphs = Graphs(model, backend, counters, captures=captures, budget_bytes=split.graph_bytes)
        staging = Staging(backend)
        max_rows = config.schedule.max_num_seqs
        sampler = Sampler(max_rows, facts.vocab_size, backend.device, backend.index_dtype)
        self._runner = Runner(
            model,
            backend,
            Rows(
                max_rows,
                max_model_len,
                block_size,
                pad_block=split.num_blocks,
                contiguous=contiguous,
            ),
            sampler,
            cache,
            graphs,
            staging,
            counters,
            vocab_size=facts.vocab_size,
            pads=not table.is_exact,
        )
        if captures:
            for bucket in table.buckets:
                staging.prepare(bucket)
        diagnostics = diagnostics_of(backend, config.execution, counters, captures=captures)
        self._runner.diagnostics = diagnostics
        if contiguous:
            cache.warm_moves()
        warmup_s = warm_up(self._runner, sampler, table.buckets, on_progress)
        graphs.stage = "serving"
        if diagnostics is not None:
            diagnostics.forget()
        self._profiler = Profiler(self._runner, backend, config.execution, config.cache_dir)
        self._profiler.begin_with_server()
        backend.settled()
        return WorkerReady(
            num_blocks=split.num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            buckets=table.buckets,
            device=backend.name,
            dtype=_name(dtype),
            weight_bytes=weight_bytes,
            kv_bytes=cache.bytes,
            graph_bytes=graphs.bytes,
            total_bytes=backend.memory()[1],
            load_s=load_s,
            warmup_s=warmup_s,
            driver=backend.driver,
            software=backend.software,
            counters=counters.take_changed(),
            contiguous=contiguous,
        )


def choose_dtype(asked: str, checkpoint: str, backend: Backend) -> torch.dtype:
    """What was asked for; for `auto` the checkpoint's own if it runs well here, else the best."""
    if asked != "auto":
        return _dtype(asked)
    own = _dtype(checkpoint)
    return own if own in backend.fast_dtypes else backend.default_dtype


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype {name!r} is not one of bfloat16, float16, float32")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _load(
    config: EngineConfig,
    facts: ModelConfig,
    dtype: torch.dtype,
    max_model_len: int,
    backend: Backend,
    on_progress: Progress,
) -> tuple[Decoder, int, float]:
    """(model with its weights, bytes of these, seconds)."""
    start = time.perf_counter()
    model = build_model(facts, dtype=dtype, device=backend.device, max_model_len=max_model_len)
    load_weights(
        model,
        config.model,
        on_progress=lambda done, total: on_progress(WarmupProgress("load", done, total)),
    )
    weight_bytes = sum(
        tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers())
    )
    backend.prepare(model)
    seconds = time.perf_counter() - start
    logger.info("Weights: %.2f GiB in %.1f s", weight_bytes / GIB, seconds)
    return model, weight_bytes, seconds


def _split(
    config: EngineConfig,
    facts: ModelConfig,
    model: Decoder,
    dtype: torch.dtype,
    backend: Backend,
    max_model_len: int,
    block_size: int,
) -> Split:
    wanted = Wanted(
        block_size=block_size,
        block_bytes=block_bytes(model, block_size, dtype),
        max_model_len=max_model_len,
        max_num_seqs=config.schedule.max_num_seqs,
    )
    # The widest launch: its activations in one layer, and the logits of all rows in float32 beside
    # what sampling makes of them.
    tokens = config.schedule.max_num_batched_tokens
    activations = tokens * (6 * facts.hidden_size + 3 * facts.intermediate_size) * dtype.itemsize
    logits = config.schedule.max_num_seqs * facts.vocab_size * 4 * 4
    return split_memory(
        config.cache,
        wanted,
        free_bytes=backend.memory()[0],
        reserve_bytes=activations + logits,
        shares_host_memory=backend.shares_host_memory,
        captures=backend.captures and not config.enforce_eager,
    )


def _table(
    config: EngineConfig, backend: Backend, max_model_len: int, block_size: int, num_blocks: int
) -> BucketTable:
    buckets = config.buckets
    if buckets.strategy == "auto":
        buckets = replace(buckets, strategy=backend.default_strategy)
    limits = BucketLimits(
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.schedule.max_num_seqs,
        max_num_batched_tokens=config.schedule.max_num_batched_tokens,
        max_prefill_batch=config.schedule.max_prefill_batch,
        num_blocks=num_blocks,
        prefix_caching=config.cache.enable_prefix_caching,
    )
    return BucketTable.make(buckets, limits)
