"""A pooling worker's parts, each made from what was made before it. As hpu/worker/build.py, without
rows,
sampler and KV cache; knows no plans."""

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from config.engine import EngineConfig
from config.model.model_config import ModelConfig
from config.model.pooler import PoolerConfig
from config.startup_checks import choose_context
from hpu.backends.base import Backend
from hpu.bucketing.bucket_table import BucketTable
from hpu.bucketing.limits import BucketLimits
from hpu.models.pooling import PoolingModel, load_pooling_model
from hpu.profiling.counters import Counters
from hpu.protocol import WarmupProgress
from hpu.runner.graph_cache import GraphCache
from hpu.runner.input_buffers import InputBufferPool
from hpu.runner.pooling_inputs import TextInputs
from hpu.runner.pooling_runner import PoolingRunner
from hpu.worker.build import Built, check_memory, choose_dtype, name_of, named_strategy
from hpu.worker.memory import GIB, plan_memory
from hpu.worker.offloaded_weights import Kept
from hpu.worker.profile_run import largest_buckets, measure_launches

logger = logging.getLogger(__name__)

MOST_STEP = 32
"""Tokens between the lengths of buckets, at most: texts are shorter than prompts."""


@dataclass(frozen=True, slots=True)
class LoadedPooling:
    """A pooling model on its device, and the facts that everything else is made by."""

    config: EngineConfig
    backend: Backend
    facts: ModelConfig
    pooler: PoolerConfig
    model: PoolingModel
    table: BucketTable
    strategy: str
    dtype: torch.dtype
    max_model_len: int
    block_size: int
    weight_bytes: int
    load_s: float

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.model.modules

    def build(self, counters: Counters, *, num_blocks: int | None = None) -> Built:
        captures = self.backend.captures and not self.config.enforce_eager
        runner, graphs, staging = self.runner(
            counters, captures=captures, graph_bytes=self.graph_bytes() if captures else 0
        )
        return Built(
            runner=runner,
            graphs=graphs,
            staging=staging,
            cache=None,
            table=self.table,
            strategy=self.strategy,
            facts=self.facts,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            weight_bytes=self.weight_bytes,
            load_s=self.load_s,
            pooling=self.pooler.facts,
        )

    def runner(
        self, counters: Counters, *, captures: bool, graph_bytes: int
    ) -> tuple[PoolingRunner, GraphCache, InputBufferPool[TextInputs]]:
        """A runner, and the parts of it that a warm-up works on."""
        backend, model = self.backend, self.model
        graphs = GraphCache(
            model.body, backend, counters, captures=captures, budget_bytes=graph_bytes
        )
        staging = InputBufferPool(backend, TextInputs)
        return PoolingRunner(model.pooler, backend, graphs, staging, counters), graphs, staging

    def graph_bytes(self) -> int:
        """What graphs may take: of what is free beside the largest launch, the configured share."""
        backend = self.backend
        reserve = 0
        if backend.peak_memory() is not None and not self.table.is_exact:
            runner, *_ = self.runner(Counters(), captures=False, graph_bytes=0)
            reserve = measure_launches(runner, backend, largest_buckets(self.table, 0))
            del runner
            gc.collect()
        free = max(0, backend.memory()[0] - reserve)
        share = self.config.cache.gpu_memory_utilization
        return int(plan_memory(free, utilization=share, graph_memory_fraction=1.0).graphs)


def load_pooling(
    config: EngineConfig,
    facts: ModelConfig,
    pooler: PoolerConfig,
    backend: Backend,
    on_progress: Callable[[WarmupProgress], None],
    kept: Kept | None = None,
) -> LoadedPooling:
    """The model with its weights, from the checkpoint unless they were `kept`. Raises ConfigError
    when the checkpoint, the device and the settings do not fit each other."""
    dtype = choose_dtype(config.dtype, facts.dtype, backend)
    max_model_len = choose_context(config, facts, pooler)
    logger.info(
        "Device %s, %s, texts of %d tokens for %s",
        backend.name,
        name_of(dtype),
        max_model_len,
        " and ".join(pooler.facts.tasks),
    )
    if config.max_model_len is None and max_model_len < facts.max_position:
        logger.info(
            "The checkpoint was made for %d tokens: --max-model-len asks for more, within "
            "--max-num-batched-tokens",
            facts.max_position,
        )
    start = time.perf_counter()
    if kept is None:
        check_memory(facts, backend, dtype, max_model_len)
    model = load_pooling_model(
        facts,
        pooler,
        dtype=dtype,
        device=backend.device,
        max_model_len=max_model_len,
        on_progress=lambda done, total: on_progress(WarmupProgress("load", done, total)),
        kept=kept,
    )
    weight_bytes = model.weight_bytes
    graphed = backend.prepare(model.body)
    assert graphed is model.body, "no back end replaces a pooling model"
    seconds = time.perf_counter() - start
    logger.info("Weights: %.2f GiB in %.1f s", weight_bytes / GIB, seconds)
    block_size = config.cache.block_size or min(backend.default_block_size, MOST_STEP)
    limits = BucketLimits.for_pooling(
        config.scheduler, block_size=block_size, max_model_len=max_model_len
    )
    buckets = named_strategy(config, backend)
    return LoadedPooling(
        config,
        backend,
        facts,
        pooler,
        model,
        BucketTable.make(buckets, limits),
        buckets.strategy,
        dtype,
        max_model_len,
        block_size,
        weight_bytes,
        seconds,
    )
