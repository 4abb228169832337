"""A checkpoint's config to its model: built in, for the architectures of
config/model/architectures.py, or of transformers' own code."""

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
"""Its attention, experts and conversions of tensors have the form that is used here."""


def build_body(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    group: ProcessGroup = SINGLE,
) -> Encoder | Decoder:
    """The model of `config` without an output head, with empty parameters; this rank's shard of it
    in the tensor-parallel `group`. ConfigError as in build_model."""
    # The registry has the model with a head.
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
    """The decoder of `config` with empty parameters; this rank's shard of it in the tensor-parallel
    `group`, with whole experts if they are distributed over an `expert_group`, and with the layers
    of this pipeline `stage`.

    `max_model_len`: tokens of the longest sequence that will be served (None: the checkpoint's
    own); it sizes the rotary table, and some rope scalings depend on it. `place_layer` as in
    Decoder. ConfigError for an architecture that is not supported, or for sizes that the group
    cannot divide.
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
    """As `build_model`, with transformers' code of the model. Without `has_files` it is built from
    its config.json alone. ConfigError for code that cannot be driven."""
    installed = importlib.metadata.version("transformers")
    if tuple(int(part) for part in installed.split(".")[:2]) < MIN_TRANSFORMERS:
        raise ConfigError(
            f"{config.path} is a {config.architecture}: to run it in the code of transformers "
            f"needs transformers {'.'.join(map(str, MIN_TRANSFORMERS))} or later, {installed} is "
            "installed"
        )
    # It imports all of transformers, which the models that are built in do not need.
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
    """`config` with the number of parameters, the KV heads and the caches that transformers' code
    of the model has, which is built without memory. ConfigError as in build_transformers_model."""
    meta = torch.device("meta")
    model = build_transformers_model(config, dtype=torch.bfloat16, device=meta, has_files=False)
    caches = model.cache_shapes(num_blocks=1, block_size=1)
    # The heads are those of the layer with the largest cache.
    _, num_kv_heads, head_dim = max((keys for keys, _ in caches), key=math.prod)
    return replace(
        config,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        cached_numbers=sum(math.prod(shape) for layer in caches for shape in layer),
    )
