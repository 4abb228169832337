"""Builds a worker's components."""

import gc
import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from config.checkpoint.draft import check_target
from config.engine import CacheConfig, EngineConfig
from config.errors import ConfigError, bytes_text
from config.model.multimodal.vision import cross_cache_tiles, encoder_cache_rows
from config.model.window_cache import CacheSizes, rings_fit_more_blocks
from hpu.backends.base import Backend
from hpu.backends.page_prefaulter import PagePrefaulter
from hpu.distributed.agreement import Agreement
from hpu.distributed.process_groups import SINGLE
from hpu.launch_inputs import LaunchArrays
from hpu.lora.context import LoRASlotInputs
from hpu.model_loader.size_estimate import (
    activation_bytes,
    cross_activation_bytes,
    cross_tile_bytes,
)
from hpu.models.base import CausalLM
from hpu.models.decoder import Decoder
from hpu.models.pooling import PoolingModel
from hpu.multimodal.base import ImageEncoder
from hpu.multimodal.device_launches import LaunchOptions
from hpu.multimodal.images import (
    TEXT_ONLY,
    ImageEncoding,
    ImageFeature,
    ImageLimits,
    Images,
    fixed_shapes,
    make_encoder_cache,
)
from hpu.multimodal.merge import used_on_host, whole
from hpu.multimodal.own_shapes import OwnShapes
from hpu.offload.block_copies import DirectCopies, StagedCopies
from hpu.offload.host_blocks import staging_bytes
from hpu.profiling.diagnostics import Diagnostics, RuntimeDiagnostics
from hpu.protocol import DECODE, PREFILL, SINGLE_RANK, Bucket, Ranks
from hpu.quantization.kv_cache import KVCacheFormat
from hpu.runner.batch_state import BatchState
from hpu.runner.counters import Counters
from hpu.runner.graph_cache import CapturingGraphCache, Forward, GraphCache
from hpu.runner.input_buffers import (
    HiddenBuffers,
    InputBufferPool,
    InputLayout,
    PrefillLayout,
)
from hpu.runner.kv_cache import KVCache, cache_sizes
from hpu.runner.launch_results import copied_results, shared_results
from hpu.runner.model_runner import RunnerParts
from hpu.runner.piecewise_forward import PiecewiseForward
from hpu.runner.pooling_runner import PoolingLayout, PoolingRunner
from hpu.runner.states import RequestStates, state_bytes
from hpu.runner.step_runner import Offload, StepRunner
from hpu.sampling.filters import ties_of
from hpu.sampling.logprobs import LogprobsMode
from hpu.sampling.sampler import Sampler
from hpu.spec_decode.hidden_cache import HiddenCache
from hpu.worker.block_offload import BlockOffload, check_offload
from hpu.worker.drafting import (
    DeviceDrafting,
    DraftCaches,
    Drafting,
    HostDrafting,
    make_draft_caches,
)
from hpu.worker.load import LoadedModel
from hpu.worker.memory import (
    FreeMemory,
    KVCacheDemand,
    MemorySplit,
    host_rule,
    kv_budget,
    plan_memory,
    split_memory,
)
from hpu.worker.memory_log import log_taken, memory_use
from hpu.worker.previous_split import PreviousSplit, is_near, split_record
from hpu.worker.profile_run import largest_buckets, measure_launches, measure_peak

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Components:
    """A runner, and the components that warm-up and sleep use."""

    runner: StepRunner
    graphs: GraphCache
    input_buffers: InputBufferPool[Any]
    cache: KVCache | None
    """None for a pooling model."""
    states: RequestStates | None = None
    """None for a model without recurrent states."""
    images: ImageFeature = TEXT_ONLY
    draft_caches: tuple[KVCache | HiddenCache, ...] = ()
    """Caches of the draft model or head."""
    offload: Offload = field(default_factory=Offload)

    @property
    def _caches(self) -> list[KVCache | HiddenCache | RequestStates]:
        caches = (self.cache, self.states, *self.draft_caches)
        return [cache for cache in caches if cache is not None]

    @property
    def cache_bytes(self) -> int:
        return sum(cache.bytes for cache in self._caches)

    @property
    def capacity(self) -> tuple[int | None, int | None]:
        """Numbers of KV blocks and rings; None without a KV cache."""
        return (None, None) if self.cache is None else (self.cache.num_blocks, self.cache.num_rings)

    def compile_copies(self, backend: Backend, *, contiguous: bool) -> None:
        """Compile what runs beside launches: scrubs and moves of blocks, and the image encoder.
        `contiguous`: decodes read the cache as a single slice."""
        if self.cache is not None and backend.compiles:
            self.cache.warm_scrub()
        self.images.warm_up(self.graphs.add_bytes)
        if self.cache is not None and contiguous:
            self.cache.warm_moves()

    @property
    def _prefaulter(self) -> PagePrefaulter:
        return PagePrefaulter() if self.cache is None else self.cache.pages_ahead

    def start_prefaulting(self) -> None:
        self._prefaulter.start()

    def end_threads(self) -> None:
        """End the threads of the offload and of the cache."""
        self.offload.close()
        self._prefaulter.close()

    def close(self) -> None:
        """Free the memory of caches, states and images, and stop the threads."""
        self.end_threads()
        self.images.close()
        for cache in self._caches:
            cache.close()

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks without the pad block; 0 without a KV cache."""
        return 0 if self.cache is None else self.cache.num_blocks


def build(
    loaded: LoadedModel,
    counters: Counters,
    *,
    num_blocks: int | None = None,
    num_rings: int | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> Components:
    """Build all components up to the warm-up. Raises ConfigError.

    Args:
        num_blocks: KV blocks; None: as configured, as in the last start with these settings, or the
            number that `split_memory` computes.
        num_rings: see LoadedModel; None: choose (`_choose_rings`).
    """
    check_speculation(loaded)
    check_offload(loaded)
    loaded = replace(loaded, num_rings=_choose_rings(loaded) if num_rings is None else num_rings)
    sampler = make_sampler(loaded)
    record = split_record(loaded)
    previous = None if record is None else record.read()
    profile_blocks = max_blocks = _max_blocks(loaded)
    if previous is not None and is_near(previous.profile_blocks, max_blocks):
        profile_blocks = previous.profile_blocks
    # All ranks must profile the same launches.
    profile_blocks = loaded.agreement.least(profile_blocks)
    memory = measure_memory(loaded, sampler, profile_blocks)
    split = _split(loaded, memory, num_blocks, previous)
    before = memory_use(loaded.backend)
    components = make_runner(
        loaded,
        sampler,
        counters,
        num_blocks=split.num_blocks,
        captures=loaded.backend.captures,
        graph_bytes=split.graph_bytes,
    )
    if not loaded.backend.shares_host_memory and isinstance(loaded.model, CausalLM):
        log_taken("Initializing cache engine", before, loaded.backend)
    # The configured number of blocks may exceed the planned number.
    left = max(0, loaded.backend.memory()[0] - memory.reserve)
    budget = min(components.graphs.budget_bytes, left)
    components.graphs.budget_bytes = loaded.agreement.least(budget)
    if record is not None and loaded.agreement.is_first:
        record.write(PreviousSplit(split.num_blocks, split.graph_bytes, profile_blocks))
    if not loaded.config.offload.is_on:
        return components
    return _with_offload(loaded, components, ranks)


def _with_offload(loaded: LoadedModel, components: Components, ranks: Ranks) -> Components:
    assert components.cache is not None, "a model with KV blocks"
    caches = [
        tensor
        for kv_cache in (components.cache, *components.draft_caches)
        for tensor in kv_cache.paged
    ]
    on_host = loaded.backend.shares_host_memory
    copies = DirectCopies if on_host else partial(StagedCopies, backend=loaded.backend)
    offload = BlockOffload(loaded, caches, ranks, copies)
    components.runner.offload = offload
    return replace(components, offload=offload)


def check_speculation(loaded: LoadedModel) -> None:
    """Raise ConfigError if speculation is configured and drafts cannot be verified."""
    method, what = loaded.config.speculation.choose(), loaded.config.model
    if method is None:
        return
    if loaded.is_pooling:
        raise ConfigError(
            f"--speculative-config names the method {method.method}, and {what} is served for "
            "pooling, which generates no tokens: leave --speculative-config out"
        )
    check_target(method, loaded.model_config)
    if loaded.prompt_vocab_size:
        raise ConfigError(
            f"--speculative-config names the method {method.method}, and prompts of {what} have "
            "image tokens, whose ids are above the vocabulary and would be drafted: leave "
            "--speculative-config out"
        )


def make_diagnostics(loaded: LoadedModel, counters: Counters) -> Diagnostics:
    """Create the counters of the runtime's work. They count compilations by phase unless graphs are
    captured, which GraphCache counts."""
    metrics = loaded.backend.runtime_metrics
    if metrics is None:
        return Diagnostics()
    return RuntimeDiagnostics(
        metrics, loaded.config.execution, counters, counts_by_phase=not loaded.backend.captures
    )


def make_sampler(loaded: LoadedModel) -> Sampler | None:
    """Create the sampler; None for a pooling model. Shapes are static if launches are padded and
    other shapes would have to be compiled or captured. Includes the runner's reserved request
    index."""
    if loaded.is_pooling:
        return None
    backend = loaded.backend
    return Sampler(
        loaded.config.scheduler.max_num_seqs + 1,
        loaded.model_config.vocab_size,
        backend,
        LogprobsMode.named(loaded.config.logprobs_mode),
        static_shapes=loaded.pads and (loaded.backend.captures or backend.compiles),
        num_sets=loaded.num_launches,
        ties=ties_of(keeps=loaded.config.handle_topk_duplicates),
    )


def make_runner(
    loaded: LoadedModel,
    sampler: Sampler | None,
    counters: Counters,
    *,
    num_blocks: int,
    captures: bool,
    graph_bytes: int,
) -> Components:
    """Create a runner over a KV cache of `num_blocks` (no cache for a pooling model). The last
    request index is reserved for the runner."""
    backend, model = loaded.backend, loaded.model
    body = model.body if isinstance(model, PoolingModel) else model
    stage = loaded.link.stage
    draft_caches = make_draft_caches(loaded, num_blocks)
    images = _make_images(loaded, counters, captures=captures)
    forward: Forward = images.merged(body)
    if loaded.weight_ring is not None:
        assert isinstance(body, Decoder), "other models keep their weights on the device"
        forward = PiecewiseForward(body, loaded.weight_ring, backend)
    drafting = _drafting(loaded, draft_caches)
    forward = drafting.keeping_hidden(forward)
    forward = loaded.lora.forward_of(forward)
    graphs = GraphCache(forward, backend, counters)
    if captures:
        graphs = CapturingGraphCache(
            forward,
            backend,
            counters,
            budget_bytes=graph_bytes,
            runs_once=loaded.has_states or loaded.num_rings > 0 or stage.size > 1,
            agreement=loaded.agreement,
        )
    if isinstance(model, PoolingModel):
        texts = InputBufferPool(backend, {PREFILL: PoolingLayout()})
        pooling_runner = PoolingRunner(model.pooler, backend, graphs, texts)
        pooling_runner.lora = loaded.lora
        return Components(pooling_runner, graphs, texts, None)
    assert sampler is not None, "a generating model samples"
    cache = _make_cache(loaded, num_blocks)
    num_requests = _num_requests(loaded)
    states = RequestStates(model, backend, num_requests) if loaded.has_states else None
    hidden_buffers = None
    if not stage.is_first:
        hidden_buffers = HiddenBuffers(backend, model.received_width, loaded.dtype)
    batch_state = BatchState(
        num_requests,
        loaded.max_model_len,
        loaded.block_size,
        pad_block=num_blocks,
        contiguous=loaded.contiguous,
    )
    features = drafting.features(batch_state)
    if loaded.lora.is_on:
        merges_prompts = loaded.prompts_per_row > 1
        features += (LoRASlotInputs(num_requests, merges_prompts=merges_prompts),)
    features += images.features
    layouts: dict[int, InputLayout[LaunchArrays]] = {
        PREFILL: PrefillLayout(
            features, prompts_per_row=loaded.prompts_per_row, hidden_buffers=hidden_buffers
        ),
        DECODE: drafting.decode_layout(sampler, features, hidden_buffers),
    }
    buffers = InputBufferPool(backend, layouts)
    parts = RunnerParts(
        model=model,
        backend=backend,
        batch_state=batch_state,
        sampler=sampler,
        cache=cache,
        graphs=graphs,
        input_buffers=buffers,
        vocab_size=loaded.model_config.vocab_size,
        make_results=shared_results if backend.shares_host_memory else copied_results,
        pads=loaded.pads,
        compared_ranks=loaded.groups.tensor if loaded.config.parallel.compare_ranks else SINGLE,
        link=loaded.link,
        agreement=Agreement(loaded.groups.stage_host),
        features=features,
    )
    runner = drafting.runner(parts, counters.add)
    runner.lora = loaded.lora
    caches = () if draft_caches is None else draft_caches.all
    return Components(runner, graphs, buffers, cache, states, images, caches)


def _drafting(loaded: LoadedModel, caches: DraftCaches | None) -> Drafting:
    """`caches`: caches of the draft model or head; None without either."""
    method = loaded.config.speculation.choose()
    if method is None:
        return Drafting(loaded)
    form = HostDrafting if loaded.backend.shares_host_memory else DeviceDrafting
    return form(loaded, method, caches)


def num_cache_rows(loaded: LoadedModel) -> int:
    """Maximum number of rows in the encoder cache (a row per image token), or of tiles for
    cross-attention; 0 for a text-only or a pooling model."""
    vision = loaded.model_config.vision
    if vision is None or loaded.is_pooling:
        return 0
    if vision.cross is not None:
        images = loaded.config.cache.cross_attention_images
        return cross_cache_tiles(vision.cross, images, loaded.config.scheduler.max_num_seqs)
    return encoder_cache_rows(loaded.max_model_len, loaded.token_budget)


def num_request_tiles(loaded: LoadedModel) -> int:
    """Maximum number of tiles of a request's images, for cross-attention; otherwise 0."""
    cross = loaded.model_config.cross_attention
    if cross is None or loaded.is_pooling:
        return 0
    return loaded.config.cache.cross_attention_images * cross.tiles_per_image


def _make_images(loaded: LoadedModel, counters: Counters, *, captures: bool) -> ImageFeature:
    facts, model = loaded.model_config.vision, loaded.model
    if facts is None or not isinstance(model, CausalLM):
        return TEXT_ONLY
    backend, tower, encoding = loaded.backend, loaded.tower, None
    if tower is not None:
        cache = make_encoder_cache(facts, model, num_cache_rows(loaded), tower.dtype, backend)
        group = loaded.groups.tensor if loaded.config.parallel.divides_images else SINGLE
        options = LaunchOptions(cache, backend, model.image_multiplier, captures, group)
        encoder: ImageEncoder
        if backend.compiles:
            encoder = fixed_shapes(tower, loaded.config.buckets.image_sizes, options)
        else:
            encoder = OwnShapes(tower, model.config.hidden_size * facts.embeddings_per_row, options)
        encoding = ImageEncoding(cache, encoder)
    return Images(
        facts,
        model,
        encoding,
        used_part=used_on_host if backend.shares_host_memory else whole,
        limits=ImageLimits(_num_requests(loaded), num_request_tiles(loaded)),
        count=counters.add,
    )


def _make_cache(loaded: LoadedModel, num_blocks: int) -> KVCache:
    assert isinstance(loaded.model, CausalLM), "a pooling model has no KV cache"
    return KVCache(
        loaded.model,
        loaded.backend,
        num_blocks=num_blocks,
        block_size=loaded.block_size,
        dtype=loaded.kv_cache_dtype,
        num_rings=loaded.num_rings,
        clean=loaded.clean_cache_rows,
    )


def _num_requests(loaded: LoadedModel) -> int:
    """Number of request indices, including the runner's reserved index."""
    return loaded.config.scheduler.max_num_seqs + 1


def measure_memory(loaded: LoadedModel, sampler: Sampler | None, profile_blocks: int) -> FreeMemory:
    """Free memory after loading, without the fixed buffers (_fixed_bytes), and the memory peak of
    the image encoder and of the largest launches over at most `profile_blocks` blocks. The peak is
    measured with a cache of a single block. It is estimated if the back end does not count memory
    or launches are not padded. It is 0 for a pooling model that is not measured or captures no
    graphs."""
    backend, is_pooling = loaded.backend, loaded.is_pooling
    fixed = _fixed_bytes(loaded)
    if is_pooling and not loaded.backend.captures:
        # Without blocks and graphs, no memory is reserved.
        return FreeMemory(backend.memory()[0], 0, is_measured=False)
    if backend.peak_memory() is None or not loaded.pads:
        reserve = 0 if is_pooling else _estimated_activations(loaded)
        return FreeMemory(max(0, backend.memory()[0] - fixed), reserve, is_measured=False)
    start, before = time.perf_counter(), memory_use(backend)
    buckets = _largest_buckets(loaded, profile_blocks)
    components = make_runner(
        loaded, sampler, Counters(), num_blocks=1, captures=False, graph_bytes=0
    )
    reserve = measure_launches(components.runner, backend, buckets)
    images = components.images
    reserve = max(reserve, measure_peak(lambda: images.warm_up(_ignore), backend))
    del components
    gc.collect()
    log_taken(
        "Model profiling run",
        before,
        backend,
        device_bytes=reserve,
        seconds=time.perf_counter() - start,
    )
    return FreeMemory(max(0, backend.memory()[0] - fixed), reserve)


def _ignore(num_bytes: int) -> None:
    """No-op: a measurement captures no graphs."""


def _state_bytes(loaded: LoadedModel) -> int:
    if not isinstance(loaded.model, CausalLM):
        return 0
    return state_bytes(loaded.model, _num_requests(loaded) + 1)


def _sizes(loaded: LoadedModel) -> CacheSizes:
    """Cache sizes, with a ring per request index and a ring for padding."""
    assert isinstance(loaded.model, CausalLM), "a pooling model has no KV cache"
    num_rings = _num_requests(loaded) + 1
    sizes = cache_sizes(loaded.model, loaded.block_size, loaded.kv_cache_dtype, num_rings)
    if loaded.drafter is None:
        return sizes
    # The drafter has a block for each block of the target.
    drafts = _sizes(loaded.drafter).block
    assert isinstance(loaded.drafter.model, CausalLM), "a drafter generates"
    width = loaded.drafter.model.hidden_width
    drafts += loaded.block_size * width * loaded.drafter.dtype.itemsize
    return sizes.with_further(drafts)


def _fixed_bytes(loaded: LoadedModel) -> int:
    """Bytes that do not depend on the number of blocks: states, rings, image embeddings (or keys
    and values of tiles) and offload staging."""
    embeddings = 0
    if loaded.tower is not None:
        embeddings = (num_cache_rows(loaded) + 1) * _image_row_bytes(loaded)
    rings = _sizes(loaded).rings if loaded.num_rings else 0
    staging = 0
    if loaded.config.offload.is_on and not loaded.backend.shares_host_memory:
        staging = staging_bytes(_sizes(loaded).block)
    return _state_bytes(loaded) + rings + embeddings + staging


def _image_row_bytes(loaded: LoadedModel) -> int:
    """Bytes of a row of `num_cache_rows`."""
    model_config, width = loaded.model_config, loaded.dtype.itemsize
    assert model_config.vision is not None
    if model_config.vision.cross is not None:
        return cross_tile_bytes(model_config, num_cards=loaded.groups.tensor.size, width=width)
    return model_config.hidden_size * model_config.vision.embeddings_per_row * width


def _choose_rings(loaded: LoadedModel) -> int:
    """Number of rings per sliding-window layer (see LoadedModel.num_rings): 0 unless rings leave
    room for more tokens, or for as many in less memory, and the model and the settings allow rings.
    For a generating model with windows, logs the reason if it is 0."""
    config, model, backend = loaded.config, loaded.model, loaded.backend
    if not isinstance(model, CausalLM):
        return 0
    windows = [window for window in model.cache_windows() if window is not None]
    if not windows:
        return 0
    if config.speculation.choose() is not None:
        logger.info(
            "Window caches: layers with a window cache the whole context, since a rejected draft "
            "would overwrite a token of the window"
        )
        return 0
    if loaded.link.stage.size > 1:
        logger.info(
            "Window caches: layers with a window cache the whole context, since a pipeline stage "
            "may have no layer with a window, and all stages must have room for the same number "
            "of requests"
        )
        return 0
    sizes, demand = _sizes(loaded), _demand(loaded)
    reserve = 0 if backend.shares_host_memory else _estimated_activations(loaded)
    available = kv_budget(
        config.cache,
        FreeMemory(max(0, backend.memory()[0] - _state_bytes(loaded)), reserve, is_measured=False),
        shares_host_memory=backend.shares_host_memory,
        graph_memory_fraction=_graph_memory_fraction(loaded),
    )
    wanted = demand.max_num_seqs * demand.context_blocks
    if backend.shares_host_memory:
        wanted = demand.host_blocks
    wanted = config.cache.num_blocks or wanted
    holds_more = loaded.agreement.all_true(rings_fit_more_blocks(sizes, available, wanted))
    if holds_more and not loaded.prefix_caching:
        return _num_requests(loaded) + 1
    logger.info(
        "Window caches: %d layers see %d tokens or fewer, and cache the whole context, because %s",
        len(windows),
        max(windows),
        "prefix caching is on: --no-enable-prefix-caching sizes them for the window"
        if holds_more
        else "all layers have a window: requests are admitted by the blocks of their whole context"
        if not sizes.full_block
        else f"windows for {demand.max_num_seqs} requests (max-num-seqs) leave no room for more "
        "tokens",
    )
    return 0


def _max_blocks(loaded: LoadedModel) -> int:
    """Number of KV blocks that fit into the free memory besides `_fixed_bytes`, at least 2; 0 for a
    pooling model."""
    if loaded.is_pooling:
        return 0
    free = max(0, loaded.backend.memory()[0] - _fixed_bytes(loaded))
    return max(2, free // _demand(loaded).block_bytes)


def _largest_buckets(loaded: LoadedModel, max_blocks: int) -> list[Bucket]:
    if loaded.is_pooling:
        return largest_buckets(loaded.bucket_table(0), 0)
    # With contiguous reads, a decode reads a slice instead of a copy, and the profile cache has a
    # single block.
    return largest_buckets(loaded.bucket_table(max_blocks), 1 if loaded.contiguous else max_blocks)


def _estimated_activations(loaded: LoadedModel) -> int:
    scheduler = loaded.config.scheduler
    sizes = {
        "num_cards": loaded.groups.tensor.size,
        "width": loaded.dtype.itemsize,
        "num_tokens": loaded.token_budget,
    }
    num_logit_rows = scheduler.max_num_seqs * loaded.config.speculation.max_tokens_per_step()
    return activation_bytes(
        loaded.model_config, **sizes, num_logit_rows=num_logit_rows
    ) + cross_activation_bytes(
        loaded.model_config,
        **sizes,
        num_seqs=scheduler.max_num_seqs,
        num_prompts=scheduler.prefill_batch(is_exact=not loaded.pads),
        images_per_request=loaded.config.cache.cross_attention_images,
    )


def _demand(loaded: LoadedModel) -> KVCacheDemand:
    sizes = _sizes(loaded)
    return KVCacheDemand(
        block_size=loaded.block_size,
        block_bytes=sizes.full_block if loaded.num_rings else sizes.block,
        max_model_len=loaded.max_model_len,
        max_num_seqs=loaded.config.scheduler.max_num_seqs,
        window_bytes=sizes.rings if loaded.num_rings else 0,
    )


def _split(
    loaded: LoadedModel,
    memory: FreeMemory,
    num_blocks: int | None,
    previous: PreviousSplit | None,
) -> MemorySplit:
    """Split the memory and log the result (no log for a pooling model). Raises ConfigError if a
    full context or the configured blocks do not fit."""
    config, backend = loaded.config, loaded.backend
    if loaded.is_pooling:
        usable = plan_memory(
            max(0, memory.free - memory.reserve),
            utilization=config.cache.gpu_memory_utilization,
            graph_memory_fraction=1.0 if loaded.backend.captures else 0.0,
        )
        return MemorySplit(num_blocks=0, graph_bytes=int(usable.graphs))
    cache = config.cache if num_blocks is None else replace(config.cache, num_blocks=num_blocks)
    sizes = _sizes(loaded)
    demand = _demand(loaded)
    split = split_memory(
        cache,
        demand,
        memory,
        num_sharing=loaded.groups.host.size if backend.shares_host_memory else 0,
        graph_memory_fraction=_graph_memory_fraction(loaded),
    )
    if previous is not None:
        split = _repeat(split, previous, cache, demand, memory)
    split = _agreed(split, loaded)
    if not backend.shares_host_memory:
        _log_memory(split, loaded.config, memory, demand, loaded.groups.host.size)
    _log_cache(split, cache, demand, loaded.kv_cache_format, on_host=backend.shares_host_memory)
    if loaded.num_rings:
        saved = (split.num_blocks + 1) * (sizes.block - sizes.full_block) - sizes.rings
        logger.info(
            "Window caches: %s for the windows of %d requests, %s less than with the "
            "whole context in all layers",
            bytes_text(sizes.rings),
            demand.max_num_seqs,
            bytes_text(saved),
        )
    if num_request_tiles(loaded):
        logger.info(
            "Images: %s for the keys and values of %d tiles",
            bytes_text((num_cache_rows(loaded) + 1) * _image_row_bytes(loaded)),
            num_cache_rows(loaded),
        )
    if loaded.has_states:
        logger.info(
            "States: %s for %d requests",
            bytes_text(_state_bytes(loaded)),
            demand.max_num_seqs,
        )
    return split


def _agreed(split: MemorySplit, loaded: LoadedModel) -> MemorySplit:
    """The split that fits on all ranks: the minimum number of blocks and the minimum graph
    budget."""
    count = loaded.agreement.least(split.num_blocks)
    if count < split.num_blocks:
        logger.info(
            "KV cache: %d blocks, as on the rank with the least memory; this rank could hold %d",
            count,
            split.num_blocks,
        )
    graph_bytes = loaded.agreement.least(split.graph_bytes)
    return replace(split, num_blocks=count, graph_bytes=graph_bytes)


def _graph_memory_fraction(loaded: LoadedModel) -> float:
    return loaded.config.warmup.graph_memory_fraction if loaded.backend.captures else 0.0


def _repeat(
    split: MemorySplit,
    previous: PreviousSplit,
    cache: CacheConfig,
    demand: KVCacheDemand,
    memory: FreeMemory,
) -> MemorySplit:
    """The previous split if its number of blocks is near the number in `split` and still fits, else
    `split`; logs the choice. A configured cache size is kept, with the previous graph budget and
    without a log line."""
    if cache.num_blocks is not None or cache.kv_cache_memory_bytes is not None:
        return replace(split, graph_bytes=previous.graph_bytes)
    count = previous.num_blocks
    needed = (count + 1) * demand.block_bytes + previous.graph_bytes
    if is_near(count, split.num_blocks) and needed <= memory.free - memory.reserve:
        logger.info(
            "Restart: %d KV blocks as in the last start with these settings (%d fit), so that its "
            "compiled recipes are used again",
            count,
            split.num_blocks,
        )
        return replace(split, num_blocks=count, graph_bytes=previous.graph_bytes)
    logger.warning(
        "Restart: %d KV blocks, not %d as in the last start with these settings, since the free "
        "memory has changed: recipes are compiled again",
        split.num_blocks,
        previous.num_blocks,
    )
    return split


def _log_memory(
    split: MemorySplit,
    config: EngineConfig,
    memory: FreeMemory,
    demand: KVCacheDemand,
    num_devices: int,
) -> None:
    """Log the memory split of a device with its own memory. `num_devices`: number of the model's
    devices that share the host memory for KV blocks."""
    kv_bytes = (split.num_blocks + 1) * demand.block_bytes
    free = max(0, memory.free - memory.reserve)
    host_blocks = config.offload.host_bytes(num_devices) // demand.block_bytes
    logger.info(
        "Free device memory: %s, %s usable (gpu_memory_utilization=%g), %s reserved for HPUGraphs "
        "(VLLM_GRAPH_RESERVED_MEM=%g), %s reserved for KV cache",
        bytes_text(free),
        bytes_text(split.usable_bytes),
        config.cache.gpu_memory_utilization,
        bytes_text(split.graph_bytes),
        config.warmup.graph_memory_fraction,
        bytes_text(kv_bytes),
        extra={
            "fields": {
                "free_bytes": free,
                "largest_launch_bytes": memory.reserve,
                "is_measured": memory.is_measured,
                "usable_bytes": split.usable_bytes,
                "graph_bytes": split.graph_bytes,
                "kv_bytes": kv_bytes,
            }
        },
    )
    logger.info(
        "# HPU blocks: %d, # CPU blocks: %d",
        split.num_blocks,
        host_blocks,
        extra={"fields": {"num_blocks": split.num_blocks, "num_host_blocks": host_blocks}},
    )


def _log_cache(
    split: MemorySplit,
    cache: CacheConfig,
    demand: KVCacheDemand,
    format: KVCacheFormat | None,
    *,
    on_host: bool,
) -> None:
    """Log size and capacity of the KV cache, and the rule of a host's default size."""
    logger.info(
        "KV cache: %d blocks of %d tokens%s%s, %s: %.1f sequences of %d tokens at once%s",
        split.num_blocks,
        demand.block_size,
        "" if format is None else f" in {format.name}",
        "" if cache.num_blocks is None else " as configured",
        bytes_text((split.num_blocks + 1) * demand.block_bytes),
        split.num_blocks / demand.context_blocks,
        demand.max_model_len,
        host_rule(cache, demand) if on_host else "",
    )
