"""MXFP8 checkpoints: e4m3 with a power of two (e8m0) per 32 inputs of an output, after OCP
Microscaling Formats, version 1.0."""

from typing import Literal

from config.model.json_fields import Fields
from config.model.quantization.base import (
    INPUTS,
    OUTPUTS,
    QuantizationConfig,
    Rule,
    StoredAxis,
    WeightPart,
    WeightScheme,
)
from config.model.quantization.fields import (
    KV_SCALES,
    POWERS,
    check_experts,
    choice,
    module_names,
    refused,
)

BLOCK = 32
"""Inputs that share a scale."""


def read_mxfp8(fields: Fields) -> QuantizationConfig:
    """Quantization of checkpoints such as MiniMax-M3-MXFP8. Raises ConfigError for unsupported
    settings."""
    choice(fields, "fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    choice(fields, "activation_scheme", "dynamic", ("dynamic",))
    choice(fields, "scale_fmt", "ue8m0", ("ue8m0",))
    check_experts(fields, "MXFP8")
    block = fields.get("weight_block_size", list, [1, BLOCK])
    if block != [1, BLOCK]:
        raise refused(fields, "weight_block_size", block, f"[1, {BLOCK}]")
    return QuantizationConfig(
        "mxfp8",
        (Rule(("Linear",), mxfp8_scheme("weight_scale_inv")),),
        ignored=module_names(fields, "ignored_layers", "modules_to_not_convert"),
        ignored_suffixes=KV_SCALES,
    )


def mxfp8_scheme(suffix: str, activations: Literal["none", "dynamic"] = "dynamic") -> WeightScheme:
    """The scheme of a weight whose scales have `suffix`."""
    outputs = StoredAxis(OUTPUTS)
    parts = (
        WeightPart("values", "weight", (outputs, StoredAxis(INPUTS)), ("F8_E4M3",)),
        WeightPart("scales", suffix, (outputs, StoredAxis(INPUTS, BLOCK)), POWERS),
    )
    return WeightScheme(8, parts, is_float=True, group_size=BLOCK, activations=activations)
