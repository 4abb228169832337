"""GPTQ checkpoints (AutoGPTQ, GPTQModel): integers of 4 or 8 bits, packed along the inputs."""

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
    checked_names,
    choice,
    group_size,
    integer_bits,
    refused,
)

_SKIPPED = "-:"
"""Before a pattern of `dynamic`: its modules are not quantized."""


def read_gptq(fields: Fields) -> QuantizationConfig:
    """Raises ConfigError for what is not served."""
    bits, size = integer_bits(fields, "bits"), group_size(fields, "group_size")
    version = choice(fields, "checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    if fields.raw.get("is_marlin_format"):
        raise refused(fields, "is_marlin_format", True, "false: weights packed as GPTQ does")
    desc_act = fields.get("desc_act", bool, False) and size is not None
    # The first version stores zero points less 1.
    offset = 1 if version == "gptq" else 0
    groups = StoredAxis(INPUTS, size or 0, is_whole=desc_act)
    rows, columns = packed_axis(INPUTS, bits), packed_axis(OUTPUTS, bits)
    outputs = StoredAxis(OUTPUTS)
    parts: tuple[WeightPart, ...] = (
        WeightPart("values", "qweight", (rows, outputs), ("I32",), bits=bits),
        WeightPart("zeros", "qzeros", (groups, columns), ("I32",), bits=bits, offset=offset),
        WeightPart("scales", "scales", (groups, outputs), FLOATS),
    )
    if desc_act:
        parts += (WeightPart("groups", "g_idx", (StoredAxis(INPUTS),), ("I32", "I64")),)
    scheme = WeightScheme(
        bits, parts, group_size=size, is_symmetric=fields.get("sym", bool, True), desc_act=desc_act
    )
    return QuantizationConfig(
        "gptq",
        (Rule(_targets(fields), scheme),),
        ignored=_ignored(fields),
        has_head=fields.get("lm_head", bool, False),
        # Biases of layers that have none: the tools store zeros.
        ignored_suffixes=(".bias", *(() if desc_act else (".g_idx",))),
    )


def _targets(fields: Fields) -> tuple[str, ...]:
    """All linear layers, or those in modules_in_block_to_quantize, a list of lists."""
    lists = fields.get("modules_in_block_to_quantize", list, [])
    names = [name for one in lists for name in (one if isinstance(one, list) else [one])]
    if not all(isinstance(name, str) for name in names):
        raise refused(fields, "modules_in_block_to_quantize", lists, "lists of names of modules")
    return checked_names(fields, "modules_in_block_to_quantize", tuple(names)) or ("Linear",)


def _ignored(fields: Fields) -> tuple[str, ...]:
    """The modules that `dynamic`, settings by pattern, leaves out."""
    dynamic = fields.get("dynamic", dict, {})
    for pattern in dynamic:
        if not pattern.startswith(_SKIPPED):
            raise refused(
                fields, "dynamic", pattern, "the same bits and groups in all modules that have any"
            )
    names = tuple(f"re:{pattern[len(_SKIPPED) :]}" for pattern in dynamic)
    return checked_names(fields, "dynamic", names)
