"""Compares the sizes in config.json with the tensor shapes in the files before a model is built, so
that no wrong size is allocated. Reads only headers."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from config.checkpoint.safetensors_files import Shapes, folder_shapes
from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.checkpoint.weight_maps.decoder import decoder_weight_map
from config.checkpoint.weight_maps.encoder import encoder_weight_map, head_weights
from config.checkpoint.weight_maps.text_part import OUTSIDE, text_part_name
from config.errors import ConfigError
from config.model.architectures import ARCHITECTURES, decoder_spec
from config.model.family_fields import causal_name
from config.model.model_config import MAX_LAYERS, ModelConfig
from config.model.pooler import PoolerConfig


def check_weights(model_config: ModelConfig, pooler: PoolerConfig | None) -> None:
    """Raise ConfigError if sizes in the config.json of the folder `model_config.path`, or in its
    pooling modules, differ from the tensor shapes in the files. A model that is not built in
    passes, except for its pooling modules."""
    shapes = folder_shapes(Path(model_config.path))
    source = Path(model_config.path, "config.json")
    check_shapes(model_config, shapes, source)
    if pooler is None:
        return
    if pooler.has_head:
        _check(head_weights(model_config, pooler.facts.width), shapes, source)
    for dense in pooler.dense:
        size = (dense.out_size, dense.in_size)
        weight = WeightSpec("linear.weight", size, "weight", "out_features x in_features")
        folder = Path(dense.folder)
        _check((weight,), folder_shapes(folder), folder / "config.json")


def check_shapes(model_config: ModelConfig, stored: Shapes, source: Path) -> None:
    """Raise ConfigError unless the sizes in `model_config`, which come from `source`, match the
    tensors `stored`. A model that is not built in passes: the worker checks it."""
    # A config.json may claim 10^9 layers: check their number with a map without layers before a map
    # with layers is built.
    outer = weight_map_of(replace(model_config, num_layers=0, layer_types=(), rope_layers=()))
    if outer is None:
        return
    shapes = {outer.map_name(name): shape for name, shape in stored.items()}
    check_num_layers(model_config, _num_layers(shapes, outer.layer_prefix), source)
    weight_map = weight_map_of(model_config)
    assert weight_map is not None
    _check(weight_map.stored_as(shapes).entries(), shapes, source)


def check_num_layers(model_config: ModelConfig, num_layers: int, source: Path) -> None:
    """Raise ConfigError unless `num_layers`, the number of layers in the files, matches
    `model_config` (with or without MTP layers) and is at most MAX_LAYERS. `source` is named in the
    error."""
    if (
        not model_config.num_layers
        <= num_layers
        <= model_config.num_layers + model_config.num_mtp_layers
    ):
        raise ConfigError(
            f"{source} specifies {model_config.num_layers} layers, the files have {num_layers}"
        )
    if num_layers > MAX_LAYERS:
        raise ConfigError(
            f"{source} specifies {num_layers} layers, at most {MAX_LAYERS} are supported"
        )


def model_shapes(model_config: ModelConfig, stored: Shapes) -> Shapes:
    """Shapes in `stored` that belong to the text model; tensors for images or audio are left
    out."""
    if not model_config.is_text_part:
        return stored
    return {
        name: shape
        for name, shape in stored.items()
        if not text_part_name(name).startswith(OUTSIDE)
    }


def weight_map_of(model_config: ModelConfig) -> WeightMap | None:
    """Weight map of a built-in model, without a classification head; None if the model is not built
    in."""
    if model_config.is_encoder:
        return encoder_weight_map(model_config)
    if causal_name(model_config.architecture) not in ARCHITECTURES:
        return None
    has_head = model_config.architecture in ARCHITECTURES
    return decoder_weight_map(
        model_config, decoder_spec(model_config, has_head=has_head), has_head=has_head
    )


def _num_layers(shapes: Shapes, prefix: str) -> int:
    pattern = re.compile(re.escape(prefix) + r"([0-9]{1,9})\.")
    found = (pattern.match(name) for name in shapes)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _check(weights: Iterable[WeightSpec], shapes: Shapes, source: Path) -> None:
    for weight in weights:
        if not weight.fields:
            continue
        shape = shapes.get(weight.name)
        says = f"{source} specifies {_size_text(weight.stored_shape)} ({_fields(weight)})"
        if shape is None:
            raise ConfigError(f"{says} for {weight.name}, the files do not have this tensor")
        if not weight.fits(shape):
            raise ConfigError(f"{says} for {weight.name}, the files have {_size_text(shape)}")


def _fields(weight: WeightSpec) -> str:
    scheme = weight.scheme
    if scheme is None:
        return weight.fields
    groups = "all inputs" if scheme.group_size is None else f"{scheme.group_size} inputs"
    kind = "FP8" if scheme.is_float else f"{scheme.bits} bits"
    return f"{weight.fields} in {kind}, a scale for {groups}"


def _size_text(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape) or "one number"
