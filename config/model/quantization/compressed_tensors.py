"""compressed-tensors checkpoints (llmcompressor): packed 4- or 8-bit integers, unpacked 8-bit
integers, FP8, and MXFP8."""

import re
from typing import Any

from config.model.json_fields import Fields
from config.model.quantization.base import (
    INPUTS,
    OUTPUTS,
    QuantizationConfig,
    QuantizationFormat,
    Rule,
    StoredAxis,
    WeightPart,
    WeightScheme,
    packed_axis,
)
from config.model.quantization.fields import (
    FLOATS,
    KV_SCALES,
    choice,
    group_size,
    integer_bits,
    module_names,
    refused,
)
from config.model.quantization.fp8 import MX_BLOCK, fp8_scheme, mxfp8_scheme

PACKED, INT8, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
MXFP8 = "mxfp8-quantized"
NAIVE = "naive-quantized"
"""Format name for unpacked INT8 or FP8, depending on the type; FP8 weight-only checkpoints use
it."""

_BLOCK = re.compile(r"[0-9]{1,9}x[0-9]{1,9}")


def read_compressed_tensors(fields: Fields) -> QuantizationConfig:
    """Quantization of compressed-tensors checkpoints. Raises ConfigError."""
    sparsity = fields.get("sparsity_config", dict, {})
    if sparsity.get("format", "dense") != "dense":
        raise refused(fields, "sparsity_config", sparsity["format"], "'dense'")
    _check_transforms(fields)
    groups = fields.get("config_groups", dict, {})
    # The checkpoint may quantize only the KV cache.
    if not groups and not fields.get("kv_cache_scheme", dict, None):
        raise refused(fields, "config_groups", groups, "an object with at least 1 group")
    rules = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise refused(fields, f"config_groups.{name}", group, "an object")
        rules.append(_rule(Fields(group, fields.file), fields))
    return QuantizationConfig(
        "compressed-tensors",
        tuple(rules),
        ignored=module_names(fields, "ignore"),
        has_head=True,
        ignored_suffixes=KV_SCALES,
    )


def _check_transforms(fields: Fields) -> None:
    """Raise ConfigError for activation rotations (QuIP, SpinQuant), which are not supported:
    without them the rotated weights give wrong outputs."""
    schemes = fields.get("transform_config", dict, {}).get("config_groups") or {}
    if not isinstance(schemes, dict):
        raise refused(fields, "config_groups in transform_config", schemes, "an object")
    for scheme in schemes.values():
        applied = scheme.get("apply") if isinstance(scheme, dict) else None
        for place in applied if isinstance(applied, list) else [applied]:
            location = place.get("location") if isinstance(place, dict) else None
            if location not in ("weight_input", "weight_output"):
                allowed = "weight_input or weight_output"
                raise refused(fields, "location in transform_config", location, allowed)


def _rule(group: Fields, whole: Fields) -> Rule:
    targets = module_names(group, "targets") or ("Linear",)
    form = group.get("format", str, None) or whole.get("format", str, None)
    raw = group.get("weights", dict, None)
    if raw is None:
        raise refused(group, "weights", raw, "an object")
    weights = Fields(raw, group.file)
    if form == NAIVE:
        form = FLOAT if weights.get("type", str, "int") == "float" else INT8
    activations = group.get("input_activations", dict, None)
    if form == FLOAT:
        return Rule(targets, _float(weights, activations))
    if form == MXFP8:
        return Rule(targets, _mxfp8(weights, activations))
    if form not in (PACKED, INT8):
        raise refused(whole, "format", form, f"one of {PACKED}, {INT8}, {FLOAT}, {MXFP8}")
    return Rule(targets, _integers(weights, is_packed=form == PACKED))


def _integers(weights: Fields, *, is_packed: bool) -> WeightScheme:
    choice(weights, "type", "int", ("int",))
    bits = integer_bits(weights, "num_bits")
    strategy = choice(weights, "strategy", None, ("group", "channel"))
    size = group_size(weights, "group_size") if strategy == "group" else None
    is_symmetric = weights.get("symmetric", bool, True)
    desc_act = _has_order(weights)
    outputs, inputs = StoredAxis(OUTPUTS), StoredAxis(INPUTS)
    groups = StoredAxis(INPUTS, size or 0, is_whole=desc_act)
    scales = WeightPart("scales", "weight_scale", (outputs, groups), FLOATS)
    if not is_packed:
        if not is_symmetric or bits != 8:
            raise refused(
                weights,
                "symmetric",
                is_symmetric,
                "true for unpacked weights, which must have 8 bits",
            )
        values = WeightPart("values", "weight", (outputs, inputs), ("I8",), bits=8, offset=128)
        return WeightScheme(8, (values, scales), group_size=size, desc_act=desc_act)
    # Stored integers and zero points have the same offset, which cancels out.
    parts: tuple[WeightPart, ...] = (
        WeightPart(
            "values", "weight_packed", (outputs, packed_axis(INPUTS, bits)), ("I32",), bits=bits
        ),
        scales,
        WeightPart("shape", "weight_shape", (), ("I64", "I32")),
    )
    if not is_symmetric:
        axes = (packed_axis(OUTPUTS, bits), groups)
        parts += (WeightPart("zeros", "weight_zero_point", axes, ("I32",), bits=bits),)
    if desc_act:
        parts += (WeightPart("groups", "weight_g_idx", (inputs,), ("I32", "I64")),)
    return WeightScheme(bits, parts, group_size=size, desc_act=desc_act)


def _has_order(weights: Fields) -> bool:
    """Whether the checkpoint has a group index per input. The value of `actorder` is then true,
    group or dynamic, depending on the release."""
    order = weights.raw.get("actorder")
    if isinstance(order, bool):
        return order
    return weights.get("actorder", str, "").lower() in ("group", "dynamic")


def _mxfp8(weights: Fields, activations: object) -> WeightScheme:
    choice(weights, "type", "float", ("float",))
    choice(weights, "strategy", "group", ("group",))
    for name, served in (("num_bits", 8), ("group_size", MX_BLOCK)):
        size = weights.count(name, served)
        if size != served:
            raise refused(weights, name, size, str(served))
    return mxfp8_scheme("weight_scale", "dynamic" if activations else "none")


def _block(weights: Fields) -> list[Any] | None:
    """Field block_structure, which early releases write as 128x128."""
    block = weights.raw.get("block_structure")
    if isinstance(block, str) and _BLOCK.fullmatch(block):
        return [int(size) for size in block.split("x")]
    other: list[Any] | None = weights.get("block_structure", list, None)
    return other


def _float(weights: Fields, activations: object) -> WeightScheme:
    choice(weights, "type", "float", ("float",))
    bits = weights.count("num_bits", 8)
    if bits != 8:
        raise refused(weights, "num_bits", bits, "8 for floats")
    strategy = choice(weights, "strategy", None, ("tensor", "channel", "block"))
    block = _block(weights) if strategy == "block" else None
    is_static = isinstance(activations, dict) and activations.get("dynamic") is False
    rows = {"tensor": 0, "channel": 1}.get(strategy, 0)
    return fp8_scheme(
        weights,
        "block_structure",
        block,
        rows=rows,
        suffix="weight_scale",
        activations="none" if activations is None else "static" if is_static else "dynamic",
    )


FORMATS = {
    # The key was renamed in release 0.6.
    "compressed-tensors": QuantizationFormat(
        read=read_compressed_tensors, config_key="compression_config"
    )
}
