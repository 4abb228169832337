"""Loads a model with its weights onto the device, for generation or for pooling."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from config.buckets import BucketConfig
from config.checkpoint.safetensors_files import folder_shapes, weight_files
from config.checkpoint.shapes import model_shapes, weight_map_of
from config.engine import AT_LOAD, DUMMY, EngineConfig
from config.errors import ConfigError, bytes_text
from config.lora.configured import unused_image_adapter
from config.model.architectures import decoder_spec, is_native
from config.model.context_length import describe_context_length, max_context_length
from config.model.decoder_spec import IndexerSpec
from config.model.kv_cache_dtype import AUTO
from config.model.model_config import ModelConfig
from config.model.pooler import PoolerConfig
from config.model.quantization.inc import INC
from config.model.rope_fields import describe_rope_conflict
from config.model.split import indexer_of
from config.parallel import WHOLE, Stage
from config.startup_checks import (
    choose_context,
    chosen_quantization,
    facts_at_load,
    quantizes_at_load,
)
from hpu.backends.base import Backend
from hpu.bucketing.bucket_table import BucketTable
from hpu.bucketing.select import GAUDI_STRATEGY, POOLING_STRATEGY
from hpu.distributed.agreement import Agreement
from hpu.distributed.pipeline import SINGLE_STAGE, PipelineLink
from hpu.distributed.process_groups import SINGLE, ProcessGroup, ProcessGroups
from hpu.host import usable_memory
from hpu.lora.manager import Adapters, LoRAManager, keep_adapted_experts
from hpu.model_loader.dummy_weights import fill_dummy
from hpu.model_loader.loader import load_weights
from hpu.model_loader.offloaded_weights import OffloadedWeights, restore
from hpu.model_loader.size_estimate import rotary_peak_bytes, weight_bytes
from hpu.models.base import CausalLM, LoadableModel, ModelBuild
from hpu.models.decoder import PlaceLayer
from hpu.models.pooling import PoolingModel, load_pooling_model
from hpu.models.registry import (
    build_model,
    build_transformers_model,
    transformers_facts,
)
from hpu.multimodal.base import Tower
from hpu.multimodal.select import build_tower, served_facts
from hpu.offload.weight_streamer import WeightStreamer
from hpu.protocol import Bucket, BucketLimits, WarmupProgress
from hpu.quantization.inc import IncCompressor
from hpu.quantization.kv_cache import KVCacheFormat, zero_non_finite
from hpu.quantization.registry import process_weights, select_patcher, select_quantization
from hpu.runner.kv_cache import cache_sizes, reads_contiguously
from hpu.worker.memory import KVCacheDemand, check_configured
from hpu.worker.memory_log import log_taken, memory_use
from hpu.worker.weight_offload import WeightsInHostMemory, weights_in_host_memory

logger = logging.getLogger(__name__)

MAX_POOLING_STEP = 32
"""Maximum step between the bucket lengths of a pooling model without a configured block size, since
texts are shorter than prompts."""

SINGLE_GROUPS = ProcessGroups()

OnProgress = Callable[[WarmupProgress], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and the settings from which the worker's components are built."""

    config: EngineConfig
    backend: Backend
    model_config: ModelConfig
    pooler: PoolerConfig | None
    """Set for a pooling model, which has no KV cache and does not sample."""
    model: CausalLM | PoolingModel
    dtype: torch.dtype
    max_model_len: int
    block_size: int
    """Tokens per KV block; for a pooling model, the step between bucket lengths."""
    weight_bytes: int
    load_s: float
    groups: ProcessGroups = SINGLE_GROUPS
    link: PipelineLink = SINGLE_STAGE
    kv_cache_format: KVCacheFormat | None = None
    """None if keys and values are cached in `dtype`, or if `patcher` quantizes them."""
    num_rings: int = 0
    """Number of rings in each sliding-window layer's cache, including a ring for padding. 0: these
    layers cache the whole context in blocks."""
    patcher: IncCompressor | None = None
    """Component that replaced modules of the model."""
    lora: Adapters = field(default_factory=Adapters)
    tower: Tower | None = None
    """Set if images are encoded."""
    drafter: "LoadedModel | None" = None
    """The draft model or head, if there is one."""
    weight_ring: WeightStreamer | None = None
    """Set if the weights of some layers are in host memory."""

    @property
    def is_pooling(self) -> bool:
        """Whether the model returns vectors or scores in place of text."""
        return self.pooler is not None

    @property
    def quantization(self) -> str | None:
        """Quantization of the weights. See chosen_quantization."""
        return chosen_quantization(self.config.quantization, self.model_config)

    @property
    def kv_cache_dtype(self) -> torch.dtype:
        if self.patcher is not None and self.patcher.quantizes_cache(self.modules[0]):
            return torch.float8_e4m3fn
        return self.dtype if self.kv_cache_format is None else self.kv_cache_format.dtype

    @property
    def clean_cache_rows(self) -> Callable[[Tensor], Tensor]:
        """Replaces non-finite values in rows of the KV cache by zeros."""
        return zero_non_finite if self.kv_cache_format is None else self.kv_cache_format.clean

    def finish(self) -> None:
        """Write the patcher's measurements, if any."""
        if self.patcher is not None:
            self.patcher.finish(self.modules[0])

    @property
    def all_models(self) -> "tuple[LoadedModel, ...]":
        return (self,) if self.drafter is None else (self, self.drafter)

    @property
    def agreement(self) -> Agreement:
        return Agreement(self.groups.host)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Modules that contain the weights."""
        own = self.model.modules if isinstance(self.model, PoolingModel) else (self.model,)
        return own if self.tower is None else (*own, self.tower)

    @property
    def num_launches(self) -> int:
        """Number of decodes whose inputs are kept: all decodes of two plans, so that an upload
        never waits for a decode of the previous plan."""
        return 2 * self.config.decodes_per_step

    @property
    def bucket_config(self) -> BucketConfig:
        """Bucket settings, in which `auto` is replaced by the device's strategy or, for a pooling
        model on a Gaudi, by POOLING_STRATEGY."""
        strategy = self.backend.default_strategy
        if self.is_pooling and strategy == GAUDI_STRATEGY:
            strategy = POOLING_STRATEGY
        return self.config.buckets.resolved(strategy)

    @property
    def pads(self) -> bool:
        return self.bucket_config.strategy != "exact"

    @property
    def contiguous(self) -> bool:
        """Whether decodes read the cache as a single slice."""
        return not self.is_pooling and reads_contiguously(
            self.config, self.backend, has_states=self.has_states
        )

    @property
    def has_states(self) -> bool:
        """Whether some layers have a recurrent state per request instead of keys and values."""
        return isinstance(self.model, CausalLM) and bool(self.model.state_specs())

    @property
    def has_windows(self) -> bool:
        return isinstance(self.model, CausalLM) and any(self.model.cache_windows())

    @property
    def prompt_vocab_size(self) -> int:
        """See WorkerReady.prompt_vocab_size."""
        model_config = self.model_config
        if model_config.cross_attention is None:
            return 0
        return model_config.vocab_size + decoder_spec(model_config).num_further_embeddings

    @property
    def prefix_caching(self) -> bool:
        """Whether cached blocks of earlier prompts are reused. Never with recurrent states, which
        are not cached."""
        return self.config.cache.enable_prefix_caching and not self.has_states

    @property
    def token_budget(self) -> int:
        return self.config.scheduler.token_budget(self.max_model_len, is_pooling=self.is_pooling)

    @property
    def prompts_per_row(self) -> int:
        """Maximum number of sequences concatenated in a row of a prefill."""
        # A scan over states needs a row per sequence, cross-attention reads the images of a row,
        # and an indexer counts the blocks of a row.
        has_cross = self.model_config.cross_attention is not None
        needs_rows = self.has_states or has_cross or _indexer(self.config, self.model_config)
        if self.is_pooling or needs_rows or not self.pads:
            return 1
        return self.backend.prompts_per_row(self.config.scheduler)

    def bucket_table(self, num_blocks: int) -> BucketTable:
        """Bucket table for a KV cache of `num_blocks`; a pooling model has no cache. Collective:
        all ranks of the model call it together."""
        scheduler = self.config.scheduler
        if self.is_pooling:
            limits = BucketLimits.for_pooling(
                scheduler, block_size=self.block_size, max_model_len=self.max_model_len
            )
        else:
            limits = BucketLimits(
                block_size=self.block_size,
                max_model_len=self.max_model_len,
                max_num_seqs=scheduler.max_num_seqs,
                max_num_batched_tokens=self.token_budget,
                max_prefill_batch=scheduler.prefill_batch(),
                num_blocks=num_blocks,
                prefix_caching=self.prefix_caching,
                chunked_prefill=scheduler.enable_chunked_prefill,
                merged_prefill=self.prompts_per_row > 1,
                bounds_references=not (self.has_states or self.has_windows),
            )
        table = BucketTable.make(self.bucket_config, limits)
        if table.is_exact:
            return table
        # Fitting may round differently on another machine: all ranks use the first rank's buckets.
        raw = self.agreement.of_first(msgspec.msgpack.encode(table.buckets))
        return BucketTable.of_buckets(msgspec.msgpack.decode(raw, type=list[Bucket]), limits)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Loaded parts of a model, before its adapters are loaded."""

    model: CausalLM | PoolingModel
    weight_bytes: int
    kv_cache_format: KVCacheFormat | None = None
    tower: Tower | None = None
    weight_ring: WeightStreamer | None = None


def load(
    config: EngineConfig,
    model_config: ModelConfig,
    pooler: PoolerConfig | None,
    backend: Backend,
    on_progress: OnProgress,
    offloaded: OffloadedWeights | None = None,
    groups: ProcessGroups = SINGLE_GROUPS,
    link: PipelineLink = SINGLE_STAGE,
) -> LoadedModel:
    """Load this rank's part of the model, with `offloaded` weights, random weights (--load-format
    dummy) or the checkpoint's. Raises ConfigError."""
    is_pooling = pooler is not None
    is_built_in = is_pooling or is_native(model_config, config.model_impl)
    if not is_pooling:
        model_config = served_facts(model_config, backend, is_native=is_built_in)
    stage = link.stage
    dtype = served_dtype(config, model_config, pooler, backend, groups, stage)
    max_model_len = choose_context(config, model_config, pooler)
    _log_model(config, model_config, pooler, backend, dtype, max_model_len)
    start, before = time.perf_counter(), memory_use(backend)
    if stage.size > 1 and (is_pooling or not is_built_in):
        what = "is served for pooling" if is_pooling else "runs on the transformers implementation"
        raise ConfigError(
            f"{config.model} {what}, and --pipeline-parallel-size is {stage.size}: pipeline "
            "stages require a decoder with a native implementation; use --tensor-parallel-size"
        )
    patcher = None if is_pooling else select_patcher(config, groups.tensor)
    weights = weights_in_host_memory(config, model_config, backend, pooler, dtype, groups.tensor)
    if offloaded is None:
        width = dtype.itemsize if patcher is None else patcher.weight_width
        num_weights = _num_weights_here(
            config, model_config, dtype, groups, stage, is_built_in=is_built_in
        )
        on_device = num_weights * width - weights.freed_bytes
        if is_built_in and not backend.shares_host_memory:
            on_device -= _bytes_saved_at_load(config, model_config, dtype, groups, stage)
        check_memory(model_config, backend, max_model_len, on_device)
    if config.load_format == DUMMY:
        logger.warning(
            "Weights: random, no files are read (--load-format dummy); the output is meaningless"
        )
    loading = _Loading(
        config,
        model_config,
        backend,
        dtype,
        max_model_len,
        groups,
        stage,
        offloaded,
        lambda done, total: on_progress(WarmupProgress("load", done, total)),
    )
    indexer = _indexer(config, model_config)
    default_size = indexer.block_size if indexer else backend.default_block_size
    block_size = config.cache.block_size or default_size
    if pooler is None:
        parts = loading.decoder(patcher, weights, block_size)
    else:
        parts = loading.pooling_model(pooler)
        block_size = config.cache.block_size or min(block_size, MAX_POOLING_STEP)
    lora = loading.adapters(parts.model) if config.lora.enable_lora else Adapters()
    load_s = time.perf_counter() - start
    log_taken(
        f"Pre-loading model weights on {backend.device}",
        before,
        backend,
        device_bytes=parts.weight_bytes,
        seconds=load_s,
    )
    loaded = LoadedModel(
        config=config,
        backend=backend,
        model_config=model_config,
        pooler=pooler,
        model=parts.model,
        dtype=dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        weight_bytes=parts.weight_bytes,
        load_s=load_s,
        groups=groups,
        link=link,
        patcher=patcher,
        kv_cache_format=parts.kv_cache_format,
        lora=lora,
        tower=parts.tower,
        weight_ring=parts.weight_ring,
    )
    if loaded.has_states:
        _log_states(config)
    return loaded


@dataclass(frozen=True, slots=True)
class _Loading:
    """Arguments shared by the functions that load a generating or a pooling model."""

    config: EngineConfig
    model_config: ModelConfig
    backend: Backend
    dtype: torch.dtype
    max_model_len: int
    groups: ProcessGroups
    stage: Stage
    offloaded: OffloadedWeights | None
    report: Callable[[int, int], None]

    @property
    def expert_group(self) -> ProcessGroup:
        return self.groups.expert if self.config.parallel.enable_expert_parallel else SINGLE

    def decoder(
        self, patcher: IncCompressor | None, weights: WeightsInHostMemory, block_size: int
    ) -> _Parts:
        """Load a generating model and its vision tower. Without a patcher, raises ConfigError
        before reading weights if the configured KV cache is too small for a full context."""
        config, backend = self.config, self.backend
        # A compressor patches the caches itself.
        kv_cache_dtype = config.cache.kv_cache_dtype if patcher is None else AUTO
        kv_cache_format = backend.kv_cache_format(kv_cache_dtype, self.dtype)
        backend.begin_load(patcher)
        decoder = self._empty_decoder(weights.place_layer)
        if kv_cache_format is not None:
            decoder.use_kv_cache_format(kv_cache_format)
        if self.stage.is_last and not self.stage.is_first and config.speculation.reads_embedding:
            decoder.keep_embedding()
        if not patcher:
            dtype = kv_cache_format.dtype if kv_cache_format else self.dtype
            self._check_kv_cache(decoder, block_size, dtype)
        tower = build_tower(
            self.model_config, dtype=self.dtype, device=backend.device, stage=self.stage
        )
        self._fill(decoder, tower)
        weight_bytes = process_weights(
            decoder, chosen_quantization(config.quantization, self.model_config)
        )
        weight_bytes += _num_bytes(decoder)
        tower_bytes = 0 if tower is None else _num_bytes(tower)
        if tower is not None:
            logger.info("Images: the vision tower has %s of weights", bytes_text(tower_bytes))
            backend.prepare_tower(tower)
            _log_image_adapter(config)
        self._keep_adapted_experts(decoder)
        ring = weights.make_ring(decoder)
        if ring is not None:
            weight_bytes += ring.device_bytes - ring.host_bytes
        prepared = backend.prepare(decoder, patcher)
        if patcher is not None:
            weight_bytes = _num_bytes(decoder)
        assert isinstance(prepared, CausalLM), "a decoder stays a decoder"
        if reads_contiguously(config, backend, has_states=bool(prepared.state_specs())):
            prepared.read_contiguously()
        if config.speculation.max_tokens_per_step() > 1 and backend.shares_host_memory:
            # Non-finite KV of a rejected draft is in the same block as the tokens before the draft.
            prepared.zero_non_finite()
        return _Parts(prepared, weight_bytes + tower_bytes, kv_cache_format, tower, ring)

    def _check_kv_cache(self, decoder: CausalLM, block_size: int, dtype: torch.dtype) -> None:
        sizes = cache_sizes(decoder, block_size, dtype, num_rings=1)
        # Sliding-window layers may get separate caches, which are not part of blocks.
        if block_bytes := sizes.full_block:
            num_seqs = self.config.scheduler.max_num_seqs
            demand = KVCacheDemand(block_size, block_bytes, self.max_model_len, num_seqs)
            check_configured(self.config.cache, demand, self.backend.memory()[1])

    def pooling_model(self, pooler: PoolerConfig) -> _Parts:
        model = load_pooling_model(
            self.model_config,
            pooler,
            ModelBuild(
                dtype=self.dtype,
                device=self.backend.device,
                max_model_len=self.max_model_len,
                group=self.groups.tensor,
            ),
            on_progress=self.report,
            offloaded=self.offloaded,
            is_dummy=self.config.load_format == DUMMY,
        )
        weight_bytes = sum(map(_num_bytes, model.modules))
        self._keep_adapted_experts(model.body)
        self.backend.adapt(model.pooler)
        prepared = self.backend.prepare(model.body)
        assert prepared is model.body, "no back end replaces a pooling model"
        return _Parts(model, weight_bytes)

    def adapters(self, model: CausalLM | PoolingModel) -> LoRAManager:
        """Create the LoRAManager of the loaded model, and warm up its adapter slots."""
        lora = LoRAManager(
            self.config.lora,
            model.body if isinstance(model, PoolingModel) else model,
            self.backend,
            group=self.groups.tensor,
            expert_group=self.expert_group,
            download_dir=self.config.download_dir,
        )
        lora.warm_up()
        return lora

    def _empty_decoder(self, place_layer: PlaceLayer) -> LoadableModel:
        quantization = select_quantization(
            self.config,
            self.model_config,
            self.dtype,
            self.backend.device,
            lambda weight: self.backend.linear_method(weight, self.dtype),
            lambda experts: self.backend.moe_method(experts, self.dtype),
        )
        build = ModelBuild(
            dtype=self.dtype,
            device=self.backend.device,
            max_model_len=self.max_model_len,
            quantization=quantization,
            group=self.groups.tensor,
            expert_group=self.expert_group,
            stage=self.stage,
        )
        if is_native(self.model_config, self.config.model_impl):
            return build_model(self.model_config, build, place_layer=place_layer)
        has_files = self.config.load_format != DUMMY
        return build_transformers_model(self.model_config, build, has_files=has_files)

    def _fill(self, decoder: LoadableModel, tower: Tower | None) -> None:
        """Set the weights: from host memory, with random values, or from the checkpoint."""
        loadable = (decoder,) if tower is None else (decoder, tower)
        if self.offloaded is not None:
            restore(self.offloaded, loadable)
            return
        if self.config.load_format == DUMMY:
            fill_dummy(loadable, on_progress=self.report)
            return
        load_weights(
            decoder,
            self.config.model,
            on_progress=self.report,
            group=self.groups.tensor,
            expert_group=self.expert_group,
            is_stage=self.stage.size > 1,
        )
        if tower is not None:
            load_weights(tower, self.config.model, on_progress=self.report)

    def _keep_adapted_experts(self, body: nn.Module) -> None:
        if self.config.lora.enable_lora:
            keep_adapted_experts(
                self.config.lora, self.model_config, body, self.config.download_dir
            )


def _log_image_adapter(config: EngineConfig) -> None:
    folder = unused_image_adapter(config.lora, config.model)
    if folder is not None:
        logger.warning(
            "The image adapter of the checkpoint, %s, is not used: set --enable-lora, "
            '--max-lora-rank and --default-mm-loras \'{"image": "..."}\'',
            folder,
        )


def served_dtype(
    config: EngineConfig,
    model_config: ModelConfig,
    pooler: PoolerConfig | None,
    backend: Backend,
    groups: ProcessGroups = SINGLE_GROUPS,
    stage: Stage = WHOLE,
) -> torch.dtype:
    """Dtype that `load` uses for the model."""
    is_pooling = pooler is not None
    is_built_in = is_pooling or is_native(model_config, config.model_impl)
    num_expert_ranks = groups.expert.size if config.parallel.enable_expert_parallel else 1
    is_whole = is_built_in and num_expert_ranks == stage.size == 1
    quantization = chosen_quantization(config.quantization, model_config)
    # Modules of the FP8 compressor, and int8, int4 and gguf weights, require bfloat16. A pooling
    # model has neither.
    needs_bfloat16 = quantization in (*AT_LOAD, INC) and not is_pooling
    configured = "bfloat16" if needs_bfloat16 else config.dtype
    return choose_dtype(configured, model_config, backend, is_plain=is_whole and not is_pooling)


def _num_weights_here(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    groups: ProcessGroups,
    stage: Stage,
    *,
    is_built_in: bool,
) -> int:
    """Number of weights on this rank. See `_num_weights`."""
    num_weights = _num_weights(config, model_config, dtype, is_built_in=is_built_in)
    if config.parallel.enable_expert_parallel and groups.expert.size > groups.tensor.size:
        num_weights -= _num_remote_weights(model_config, groups.expert.size // groups.tensor.size)
    return math.ceil(num_weights / (groups.tensor.size * stage.size))


def _num_weights(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, *, is_built_in: bool
) -> int:
    """Number of weights in the checkpoint's files or, without files, of the model. For quantized
    weights, the number of `dtype` elements with the same size. 0 for a model that is rejected when
    it is built."""
    if model_config.is_quantized and config.load_format != DUMMY:
        files = weight_files(Path(model_config.path))
        return sum(file.stat().st_size for file in files) // dtype.itemsize
    if config.load_format != DUMMY:
        stored = folder_shapes(Path(model_config.path))
        own = stored if model_config.vision is not None else model_shapes(model_config, stored)
        return sum(map(math.prod, own.values()))
    if not is_built_in:
        return transformers_facts(model_config).num_parameters or 0
    weight_map = weight_map_of(model_config)
    return sum(spec.num_elements() for spec in weight_map.entries()) if weight_map else 0


def _bytes_saved_at_load(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    groups: ProcessGroups,
    stage: Stage,
) -> int:
    """Bytes that quantizing while loading saves, compared with this rank's weights in `dtype`."""
    if not quantizes_at_load(config.quantization, model_config):
        return 0
    plain, quantized = (
        weight_bytes(own, num_cards=groups.tensor.size, width=dtype.itemsize, length=0, stage=stage)
        for own in (model_config, facts_at_load(config.quantization, model_config))
    )
    return plain - quantized


def _num_remote_weights(model_config: ModelConfig, num_engines: int) -> int:
    """Number of expert weights on the devices of other engines."""
    moe = model_config.moe
    assert moe is not None, "only experts are distributed over engines"
    num_layers = sum(moe.has_experts(index) for index in range(model_config.num_layers))
    num_weights = num_layers * moe.num_experts * 3 * model_config.hidden_size * moe.inner_size
    return num_weights - num_weights // num_engines


def check_memory(
    model_config: ModelConfig,
    backend: Backend,
    max_model_len: int,
    weights: int,
) -> None:
    """Raise ConfigError if `weights` bytes exceed the device's total memory, or if the computation
    of a decoder's rotary table takes more than the host's. Without this check, some systems
    overcommit memory and kill the process later."""
    if weights > (total := backend.memory()[1]):
        raise ConfigError(
            f"the weights in {model_config.path} take {bytes_text(weights)}, {backend.name} has "
            f"{bytes_text(total)}: use a smaller or quantized model"
        )
    if model_config.is_encoder:
        return
    rotary, host = rotary_peak_bytes(model_config, max_model_len), usable_memory()[1]
    if rotary > host:
        raise ConfigError(
            f"the rotary table for {max_model_len} tokens takes {bytes_text(rotary)} to compute, "
            f"this machine has {bytes_text(host)}: set a smaller --max-model-len"
        )


def choose_dtype(
    configured: str, model_config: ModelConfig, backend: Backend, *, is_plain: bool = True
) -> torch.dtype:
    """The configured dtype; for `auto`, the back end's preference (Backend.dtype_for)."""
    if configured == "auto":
        return backend.dtype_for(model_config, is_plain=is_plain)
    return _dtype(configured)


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a dtype: bfloat16 instead of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype {name!r} is not one of bfloat16, float16, float32")
    return dtype


def _num_bytes(module: nn.Module) -> int:
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _indexer(config: EngineConfig, model_config: ModelConfig) -> IndexerSpec | None:
    return indexer_of(model_config) if is_native(model_config, config.model_impl) else None


def _log_states(config: EngineConfig) -> None:
    """Log the features that a model with recurrent states does not support."""
    why = "the model has recurrent layers"
    if config.cache.enable_prefix_caching:
        logger.info("Prefix caching is off: %s, whose states are not cached with the blocks", why)
    if config.scheduler.merged_prefill:
        logger.info("Merged prefill is off: %s, which take one prompt in each row", why)


def _log_model(
    config: EngineConfig,
    model_config: ModelConfig,
    pooler: PoolerConfig | None,
    backend: Backend,
    dtype: torch.dtype,
    max_model_len: int,
) -> None:
    if lost := describe_rope_conflict(model_config.fields):
        logger.warning(
            "rope_scaling and rope_parameters in %s differ: rope_scaling is used, as in "
            "transformers; ignored fields of rope_parameters: %s",
            model_config.fields.file,
            lost,
        )
    longest = max_context_length(model_config)
    if max_model_len > longest:
        logger.warning(
            "The context of %d tokens is longer than the %d that the checkpoint was made for: "
            "beyond them answers may get worse (--allow-long-max-model-len)",
            max_model_len,
            longest,
        )
    if pooler is None:
        logger.info("Device %s, %s, context %d", backend.name, dtype_name(dtype), max_model_len)
    else:
        logger.info(
            "Device %s, %s, texts of %d tokens for %s",
            backend.name,
            dtype_name(dtype),
            max_model_len,
            " and ".join(pooler.facts.tasks),
        )
    if config.max_model_len is None and max_model_len < longest:
        logger.info(
            "The checkpoint was made for %s: set --max-model-len to use a longer context",
            describe_context_length(model_config),
        )
