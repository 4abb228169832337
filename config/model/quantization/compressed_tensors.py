"""compressed-tensors checkpoints (llmcompressor): packed integers of 4 or 8 bits, plain ones of 8,
and FP8."""

from config.model.json_fields import Fields
from config.model.quantization.base import (
    INPUTS,
    OUTPUTS,
    QuantizationConfig,
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
from config.model.quantization.fp8 import fp8_scheme

PACKED, INT8, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
NAIVE = "naive-quantized"
"""The form of INT8 or FLOAT, by the type: weights alone in FP8 get it."""


def read_compressed_tensors(fields: Fields) -> QuantizationConfig:
    """Raises ConfigError for what is not served."""
    sparsity = fields.get("sparsity_config", dict, {})
    if sparsity.get("format", "dense") != "dense":
        raise refused(fields, "sparsity_config", sparsity["format"], "'dense'")
    groups = fields.get("config_groups", dict, {})
    # The cache alone may be quantized.
    if not groups and not fields.get("kv_cache_scheme", dict, None):
        raise refused(fields, "config_groups", groups, "one group or several")
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
    if form not in (PACKED, INT8):
        raise refused(whole, "format", form, f"one of {PACKED}, {INT8}, {FLOAT}")
    return Rule(targets, _integers(weights, is_packed=form == PACKED))


def _integers(weights: Fields, *, is_packed: bool) -> WeightScheme:
    choice(weights, "type", "int", ("int",))
    bits = integer_bits(weights, "num_bits")
    strategy = choice(weights, "strategy", None, ("group", "channel"))
    size = group_size(weights, "group_size") if strategy == "group" else None
    is_symmetric = weights.get("symmetric", bool, True)
    desc_act = weights.get("actorder", str, None) == "group"
    outputs, inputs = StoredAxis(OUTPUTS), StoredAxis(INPUTS)
    groups = StoredAxis(INPUTS, size or 0, is_whole=desc_act)
    scales = WeightPart("scales", "weight_scale", (outputs, groups), FLOATS)
    if not is_packed:
        if not is_symmetric or bits != 8:
            raise refused(weights, "symmetric", is_symmetric, "true, with 8 bits not packed")
        values = WeightPart("values", "weight", (outputs, inputs), ("I8",), bits=8, offset=128)
        return WeightScheme(8, (values, scales), group_size=size, desc_act=desc_act)
    # Stored integers and zero points count from the middle, which cancels out.
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
    return WeightScheme(bits, parts, group_size=size, is_symmetric=is_symmetric, desc_act=desc_act)


def _float(weights: Fields, activations: object) -> WeightScheme:
    choice(weights, "type", "float", ("float",))
    bits = weights.count("num_bits", 8)
    if bits != 8:
        raise refused(weights, "num_bits", bits, "8, of floats")
    strategy = choice(weights, "strategy", None, ("tensor", "channel", "block"))
    block = weights.get("block_structure", list, None) if strategy == "block" else None
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
