"""FP8 checkpoints (e4m3) with per-tensor scales, or with block scales as in DeepSeek-V3. MXFP8: a
power-of-two scale (e8m0) per 32 inputs of an output, as in OCP Microscaling Formats, version
1.0."""

from typing import Any, Literal

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
)
from config.model.quantization.fields import (
    FLOATS,
    KV_SCALES,
    POWERS,
    check_experts,
    choice,
    module_names,
    refused,
)

MX_BLOCK = 32
"""Number of inputs per scale in MXFP8."""


def read_fp8(fields: Fields) -> QuantizationConfig:
    """Quantization of FP8 checkpoints. Raises ConfigError."""
    choice(fields, "fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    kind = choice(fields, "activation_scheme", "dynamic", ("dynamic", "static"))
    check_experts(fields, "FP8")
    block = fields.get("weight_block_size", list, None)
    has_powers = choice(fields, "scale_fmt", "float", ("float", "ue8m0")) == "ue8m0"
    scheme = fp8_scheme(
        fields,
        "weight_block_size",
        block,
        rows=0,
        suffix="weight_scale" if block is None else "weight_scale_inv",
        activations="static" if kind == "static" else "dynamic",
        # DeepSeek-V3.1 says ue8m0 for powers of two stored as float32; transformers stores the
        # exponents.
        scale_dtypes=(*FLOATS, *POWERS) if has_powers else FLOATS,
    )
    return QuantizationConfig(
        "fp8",
        (Rule(("Linear",), scheme),),
        ignored=module_names(fields, "ignored_layers", "modules_to_not_convert"),
        ignored_suffixes=KV_SCALES,
    )


def fp8_scheme(
    fields: Fields,
    name: str,
    block: list[Any] | None,
    *,
    rows: int,
    suffix: str,
    activations: Literal["none", "dynamic", "static"],
    scale_dtypes: tuple[str, ...] = FLOATS,
) -> WeightScheme:
    """FP8 scheme with scales per block (outputs, inputs), whose size is in the field `name`, or
    with a scale per `rows` outputs (0: per tensor)."""
    columns = 0
    if block is not None:
        if len(block) != 2 or not all(type(dim) is int and dim > 0 for dim in block):
            raise refused(fields, name, block, "two positive numbers")
        rows, columns = block
    return _scheme(rows, columns, suffix, activations, scale_dtypes)


def _scheme(
    rows: int,
    columns: int,
    suffix: str,
    activations: Literal["none", "dynamic", "static"],
    scale_dtypes: tuple[str, ...] = FLOATS,
) -> WeightScheme:
    """FP8 scheme with a scale per `rows` outputs and `columns` inputs (0: all)."""
    axes = (StoredAxis(OUTPUTS, rows), StoredAxis(INPUTS, columns))
    parts: tuple[WeightPart, ...] = (
        WeightPart("values", "weight", (StoredAxis(OUTPUTS), StoredAxis(INPUTS)), ("F8_E4M3",)),
        WeightPart("scales", suffix, axes if rows or columns else (), scale_dtypes),
    )
    if activations == "static":
        parts += (WeightPart("input_scale", "input_scale", (), FLOATS),)
    return WeightScheme(
        8,
        parts,
        is_float=True,
        group_size=columns or None,
        activations=activations,
    )


def read_mxfp8(fields: Fields) -> QuantizationConfig:
    """Quantization of checkpoints such as MiniMax-M3-MXFP8. Raises ConfigError."""
    choice(fields, "fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    choice(fields, "activation_scheme", "dynamic", ("dynamic",))
    choice(fields, "scale_fmt", "ue8m0", ("ue8m0",))
    check_experts(fields, "MXFP8")
    block = fields.get("weight_block_size", list, [1, MX_BLOCK])
    if block != [1, MX_BLOCK]:
        raise refused(fields, "weight_block_size", block, f"[1, {MX_BLOCK}]")
    return QuantizationConfig(
        "mxfp8",
        (Rule(("Linear",), mxfp8_scheme("weight_scale_inv")),),
        ignored=module_names(fields, "ignored_layers", "modules_to_not_convert"),
        ignored_suffixes=KV_SCALES,
    )


def mxfp8_scheme(suffix: str, activations: Literal["none", "dynamic"] = "dynamic") -> WeightScheme:
    """MXFP8 scheme. `suffix`: name of the scale tensor in the module."""
    outputs = StoredAxis(OUTPUTS)
    parts = (
        WeightPart("values", "weight", (outputs, StoredAxis(INPUTS)), ("F8_E4M3",)),
        WeightPart("scales", suffix, (outputs, StoredAxis(INPUTS, MX_BLOCK)), POWERS),
    )
    return WeightScheme(8, parts, is_float=True, group_size=MX_BLOCK, activations=activations)


FORMATS = {
    "fp8": QuantizationFormat(
        read=read_fp8,
        # vLLM's name for scales of tokens and of outputs.
        spellings=("ptpc_fp8",),
        # A scale per output, and a scale per token.
        at_load=(_scheme(1, 0, "weight_scale", "dynamic"),),
    ),
    "mxfp8": QuantizationFormat(read=read_mxfp8),
}
