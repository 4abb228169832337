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
from hpu.models.base import LoadableModel, ModelBuild
from hpu.models.decoder import Decoder, PlaceLayer, leave_in_place
from hpu.models.encoder import Encoder

MIN_TRANSFORMERS = (5, 18)
"""Minimum transformers release: earlier releases have other forms of attention, experts and
tensor conversions."""


def build_body(config: ModelConfig, build: ModelBuild) -> Encoder | Decoder:
    """Model of `config` without an output head, with empty parameters. Raises ConfigError; see
    build_model."""
    # The registry lists the architecture with a head.
    causal = replace(config, architecture=causal_name(config.architecture))
    _check_groups(causal, build)
    if config.is_encoder:
        return Encoder(config, dtype=build.dtype, device=build.device, group=build.group)
    return Decoder(config, decoder_spec(config, has_head=False), build, has_head=False)


def build_model(
    config: ModelConfig, build: ModelBuild, *, place_layer: PlaceLayer = leave_in_place
) -> Decoder:
    """Decoder of `config` with empty parameters: this rank's shard of the layers of this pipeline
    stage. `place_layer`: see Decoder. Raises ConfigError."""
    _check_groups(config, build)
    spec = decoder_spec(config)
    check_stages(config, build.stage.size)
    return Decoder(config, spec, build, place_layer=place_layer)


def _check_groups(config: ModelConfig, build: ModelBuild) -> None:
    size, num_expert_ranks = build.group.size, build.expert_group.size
    is_distributed = num_expert_ranks > 1
    num_engines = num_expert_ranks // size if is_distributed else 1
    check_split(config, size, distributes_experts=is_distributed, num_engines=num_engines)


def build_transformers_model(
    config: ModelConfig, build: ModelBuild, *, has_files: bool = True
) -> LoadableModel:
    """Model that runs transformers' code. `has_files` False: build it from config.json only.
    Raises ConfigError for unsupported code and for a release before MIN_TRANSFORMERS."""
    installed = importlib.metadata.version("transformers")
    if tuple(int(part) for part in installed.split(".")[:2]) < MIN_TRANSFORMERS:
        raise ConfigError(
            f"{config.path} is a {config.architecture}, whose implementation needs transformers "
            f"{'.'.join(map(str, MIN_TRANSFORMERS))} or later, {installed} is installed"
        )
    # Imports all of transformers, which built-in models do not need.
    from hpu.models.transformers_fallback import TransformersModel

    return TransformersModel(config, build, has_files=has_files)


def transformers_facts(config: ModelConfig) -> ModelConfig:
    """`config` with the number of parameters, the KV heads and the cache sizes of the transformers
    implementation, which is built on the meta device. Raises ConfigError; see
    build_transformers_model."""
    build = ModelBuild(dtype=torch.bfloat16, device=torch.device("meta"))
    model = build_transformers_model(config, build, has_files=False)
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
