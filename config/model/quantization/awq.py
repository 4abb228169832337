"""AWQ checkpoints (AutoAWQ, version gemm): 4-bit integers, packed along the outputs."""

from config.model.json_fields import Fields
from config.model.quantization.base import (
    INPUTS,
    OUTPUTS,
    Packing,
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
    dynamic_overrides,
    group_size,
    integer_bits,
    module_names,
    refused,
)

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output index of each of the eight values in an int32, from the lowest bits up."""


def read_awq(fields: Fields) -> QuantizationConfig:
    """Quantization of AWQ checkpoints. Raises ConfigError."""
    for name in ("version", "checkpoint_format"):
        version = fields.get(name, str, "gemm")
        if version.lower() != "gemm":
            raise refused(fields, name, version, "'gemm'")
    # Only check the type of `zero_point`: symmetric checkpoints also store zero points.
    fields.get("zero_point", bool, True)
    return QuantizationConfig(
        "awq",
        (Rule(("Linear",), awq_scheme(fields)),),
        dynamic_overrides(fields, awq_scheme),
        ignored=module_names(fields, "modules_to_not_convert"),
        has_head=fields.get("lm_head", bool, False),
    )


def awq_scheme(fields: Fields) -> WeightScheme:
    """The scheme of modules with the settings `fields`. Raises ConfigError."""
    bits = integer_bits(fields, "bits", "w_bit")
    if bits != len(ORDER) // 2:
        raise refused(fields, "bits", bits, "4")
    size = group_size(fields, "group_size", "q_group_size")
    inputs, groups = StoredAxis(INPUTS), StoredAxis(INPUTS, size or 0)
    columns = packed_axis(OUTPUTS, bits)
    parts = (
        WeightPart("values", "qweight", (inputs, columns), ("I32",), bits=bits, order=ORDER),
        WeightPart("zeros", "qzeros", (groups, columns), ("I32",), bits=bits, order=ORDER),
        WeightPart("scales", "scales", (groups, StoredAxis(OUTPUTS)), FLOATS),
    )
    return WeightScheme(bits, parts, group_size=size)


def _packing(packing: str, settings: Fields) -> Packing | None:
    return (settings, awq_scheme) if "awq" in packing else None


FORMATS = {
    "awq": QuantizationFormat(
        read=read_awq,
        spellings=("awq_marlin", "awq_hpu", "marlin", "moe_wna16"),
        file="quant_config.json",
        auto_round=_packing,
    )
}
