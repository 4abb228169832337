"""Model construction from a checkpoint's config: built-in models for the architectures of
config/model/architectures.py, or models that run transformers' code."""

import importlib.metadata
import math
from dataclasses import replace

import torch

from config.errors import ConfigError
from config.model.architectures import decoder_spec
from config.model.family_fields import causal_name
from config.model.model_config import ModelConfig
from config.model.split import check_split, check_stages
from config.parallel import WHOLE, Stage
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.models.base import LoadableModel
from hpu.models.decoder import Decoder, PlaceLayer
from hpu.models.encoder import Encoder
from hpu.quantization.base import QuantizationScheme

MIN_TRANSFORMERS = (5, 18)
"""Minimum transformers release: earlier releases have other forms of attention, experts and
tensor conversions."""


def build_body(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    group: ProcessGroup = SINGLE,
) -> Encoder | Decoder:
    """Model of `config` without an output head, with empty parameters; this rank's shard in the
    tensor-parallel `group`. Raises ConfigError; see build_model."""
    # The registry lists the architecture with a head.
    causal = replace(config, architecture=causal_name(config.architecture))
    _check_groups(causal, group, SINGLE)
    if config.encoder is not None:
        return Encoder(config, dtype=dtype, device=device, group=group)
    spec = decoder_spec(config, has_head=False)
    return Decoder(
        config,
        spec,
        dtype=dtype,
        device=device,
        length=max_model_len,
        has_head=False,
        group=group,
    )


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    quantization: QuantizationScheme | None = None,
    group: ProcessGroup = SINGLE,
    expert_group: ProcessGroup = SINGLE,
    stage: Stage = WHOLE,
    place_layer: PlaceLayer | None = None,
) -> Decoder:
    """Decoder of `config` with empty parameters: this rank's shard in the tensor-parallel
    `group`, with whole experts if an `expert_group` distributes them, and the layers of this
    pipeline `stage`.

    `max_model_len`: maximum sequence length to serve, in tokens (None: the checkpoint's
    maximum). It sizes the rotary table, and some rope scalings depend on it. `place_layer`: see
    Decoder. Raises ConfigError for an unsupported architecture, or for sizes that the group does
    not divide.
    """
    _check_groups(config, group, expert_group)
    spec = decoder_spec(config)
    check_stages(config, stage.size)
    length = config.max_position if max_model_len is None else max_model_len
    return Decoder(
        config,
        spec,
        dtype=dtype,
        device=device,
        length=length,
        quantization=quantization,
        group=group,
        expert_group=expert_group,
        stage=stage,
        place_layer=place_layer,
    )


def _check_groups(config: ModelConfig, group: ProcessGroup, expert_group: ProcessGroup) -> None:
    is_distributed = expert_group.size > 1
    num_engines = expert_group.size // group.size if is_distributed else 1
    check_split(config, group.size, distributes_experts=is_distributed, num_engines=num_engines)


def build_transformers_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    quantization: QuantizationScheme | None = None,
    group: ProcessGroup = SINGLE,
    expert_group: ProcessGroup = SINGLE,
    has_files: bool = True,
) -> LoadableModel:
    """Model that runs transformers' code; arguments as in `build_model`. `has_files` False:
    build it from config.json only. Raises ConfigError for unsupported code."""
    installed = importlib.metadata.version("transformers")
    if tuple(int(part) for part in installed.split(".")[:2]) < MIN_TRANSFORMERS:
        raise ConfigError(
            f"{config.path} is a {config.architecture}, whose implementation needs transformers "
            f"{'.'.join(map(str, MIN_TRANSFORMERS))} or later, {installed} is installed"
        )
    # Imports all of transformers, which built-in models do not need.
    from hpu.models.transformers_fallback import TransformersModel

    return TransformersModel(
        config,
        dtype=dtype,
        device=device,
        length=config.max_position if max_model_len is None else max_model_len,
        quantization=quantization,
        group=group,
        expert_group=expert_group,
        has_files=has_files,
    )


def transformers_facts(config: ModelConfig) -> ModelConfig:
    """`config` with the number of parameters, the KV heads and the cache sizes of the transformers
    implementation, which is built on the meta device. Raises ConfigError; see
    build_transformers_model."""
    meta = torch.device("meta")
    model = build_transformers_model(config, dtype=torch.bfloat16, device=meta, has_files=False)
    caches = model.cache_shapes(num_blocks=1, block_size=1)
    # Use the heads of the layer with the largest cache.
    _, num_kv_heads, head_dim = max((keys for keys, _ in caches), key=math.prod)
    return replace(
        config,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        cached_numbers=sum(math.prod(shape) for layer in caches for shape in layer),
    )
