"""AWQ checkpoints (AutoAWQ, version gemm): integers of 4 bits, packed along the outputs."""

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
    group_size,
    integer_bits,
    module_names,
    refused,
)

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of the eight outputs in an int32, from its lowest bits on."""


def read_awq(fields: Fields) -> QuantizationConfig:
    """Raises ConfigError for what is not served."""
    bits = integer_bits(fields, "bits", "w_bit")
    if bits != len(ORDER) // 2:
        raise refused(fields, "bits", bits, "4")
    version = fields.get("version", str, "gemm")
    if version.lower() != "gemm":
        raise refused(fields, "version", version, "'gemm'")
    # Symmetric weights have zero points in the files, too.
    fields.get("zero_point", bool, True)
    size = group_size(fields, "group_size", "q_group_size")
    inputs, groups = StoredAxis(INPUTS), StoredAxis(INPUTS, size or 0)
    columns = packed_axis(OUTPUTS, bits)
    parts = (
        WeightPart("values", "qweight", (inputs, columns), ("I32",), bits=bits, order=ORDER),
        WeightPart("zeros", "qzeros", (groups, columns), ("I32",), bits=bits, order=ORDER),
        WeightPart("scales", "scales", (groups, StoredAxis(OUTPUTS)), FLOATS),
    )
    scheme = WeightScheme(bits, parts, group_size=size, is_symmetric=False)
    return QuantizationConfig(
        "awq",
        (Rule(("Linear",), scheme),),
        ignored=module_names(fields, "modules_to_not_convert"),
    )
