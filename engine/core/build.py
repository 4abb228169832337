"""build_core: assembles an EngineCore from the workers' report."""

import logging
from collections.abc import Iterable

from config.engine import EngineConfig
from config.lora.info import LoRAInfo
from engine.core.coupled_steps import SINGLE_ENGINE, StepSync
from engine.core.engine_core import Clock, CoreParts, EngineCore, OnStart
from engine.executors.base import Executor
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.offload import KVOffload
from engine.scheduling.encoder_cache import EncoderCacheManager
from engine.scheduling.fair_queue import make_waiting_queue
from engine.scheduling.launch_packer import LaunchPacker
from engine.scheduling.lora_slots import LoRASlots
from engine.scheduling.pooling_scheduler import PoolingScheduler
from engine.scheduling.resource import RequestResource, WholePrompts
from engine.scheduling.scheduler import LaunchFacts, Scheduler
from engine.stats import StepStats
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import DECODE, WorkerReady

logger = logging.getLogger(__name__)


def build_core(
    config: EngineConfig,
    executor: Executor,
    ready: WorkerReady,
    table: BucketTable,
    clock: Clock,
    *,
    sync: StepSync = SINGLE_ENGINE,
    adapters: Iterable[LoRAInfo] = (),
    on_start: OnStart | None = None,
) -> EngineCore:
    """Assemble a core. `ready`: report of the started workers. `adapters`: adapters that are served
    from the start."""
    stats = StepStats(graph_bytes=ready.graph_bytes)
    stats.update_counters(ready.counters)
    kv = _kv_cache(config, ready, table)
    max_tokens = config.scheduler.token_budget(
        ready.max_model_len, is_pooling=ready.pooling is not None
    )
    packer = LaunchPacker(
        table,
        max_prefill_batch=config.scheduler.prefill_batch(
            is_pooling=ready.pooling is not None, is_exact=table.is_exact
        ),
        max_tokens=max_tokens,
        stats=stats,
        on_unwarmed=config.warmup.on_unwarmed_shape,
        contiguous=ready.contiguous,
        merges_prompts=table.limits.merged_prefill,
    )
    lora = LoRASlots(config.lora)
    encoder = EncoderCacheManager(
        ready.encoder_cache_tokens,
        max_tokens,
        whole_images=ready.whole_images,
        request_tiles=ready.request_tiles,
    )
    # Leave out resources that no request can use: the scheduler calls each resource in every step.
    resources: list[RequestResource] = [lora] if lora.is_enabled else []
    if encoder.max_tokens:
        resources.append(encoder)
    if not config.scheduler.enable_chunked_prefill:
        resources.append(WholePrompts())
    waiting = make_waiting_queue(config.scheduler, lora)
    scheduler: Scheduler | PoolingScheduler
    if ready.pooling is not None:
        scheduler = PoolingScheduler(
            config.scheduler, waiting, ready.pooling, packer, max_tokens, resources
        )
    else:
        facts = LaunchFacts(
            ready.prefill_launch_tokens,
            config.parallel.pipeline_parallel_size,
            ready.max_tokens_per_step,
            config.decodes_per_step,
            config.execution.defrag_threshold,
        )
        scheduler = Scheduler(config.scheduler, waiting, kv, packer, stats, resources, facts)
        requested, reason = config.scheduler.num_scheduler_steps, config.single_decode_reason
        logger.info(
            "Decodes of a request in a step: %d (--num-scheduler-steps%s); steps in flight: %d",
            config.decodes_per_step,
            f" {requested} has no effect: {reason}" if reason and requested > 1 else "",
            config.max_inflight_steps,
        )
    parts = CoreParts(table, packer, kv, lora, encoder, scheduler, stats, sync)
    for info in adapters:
        lora.register(info)
    return EngineCore(config, executor, ready, parts, clock, on_start)


def _kv_cache(config: EngineConfig, ready: WorkerReady, table: BucketTable) -> KVCacheManager:
    offload = KVOffload(
        ready.offload,
        ready.block_size,
        only_preempted=config.offload.kv_offloading_size == 0,
    )
    return KVCacheManager(
        _num_usable_blocks(config, ready, table),
        ready.block_size,
        prefix_caching=config.cache.enable_prefix_caching and ready.bucket_limits.prefix_caching,
        contiguous=ready.contiguous,
        num_lookahead_tokens=(ready.max_tokens_per_step - 1) * config.max_inflight_steps,
        offload=offload,
        all_see_images=ready.request_tiles > 0,
    )


def _num_usable_blocks(config: EngineConfig, ready: WorkerReady, table: BucketTable) -> int:
    """Number of KV blocks to use: all blocks of the worker. If decodes read a slice of the cache
    and shapes that were not warmed up are rejected: at most the blocks of the largest warmed-up
    decode bucket."""
    may_reject = config.warmup.on_unwarmed_shape == "reject" and not table.is_exact
    if not (ready.contiguous and may_reject):
        return ready.num_blocks
    widest = max((bucket[3] for bucket in table.buckets if bucket[0] == DECODE), default=0)
    return min(ready.num_blocks, widest)
