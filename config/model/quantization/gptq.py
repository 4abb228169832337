"""GPTQ checkpoints (AutoGPTQ, GPTQModel): 4- or 8-bit integers, packed along the inputs."""

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
    checked_names,
    choice,
    dynamic_overrides,
    group_size,
    integer_bits,
    refused,
)

VERSIONS = ("gptq", "gptq_v2")
"""Values of checkpoint_format."""
VERSION_2 = VERSIONS[1]
_PLAIN_PACKINGS = ("auto_round", "auto_round:exllamav2", "auto_round:tritonv2")
"""AutoRound packings that store zero points unchanged; GPTQ stores them minus 1."""


def read_gptq(fields: Fields) -> QuantizationConfig:
    """Quantization of GPTQ checkpoints. Raises ConfigError."""
    choice(fields, "checkpoint_format", "gptq", VERSIONS)
    if fields.raw.get("is_marlin_format"):
        raise refused(
            fields, "is_marlin_format", True, "false, with weights packed in GPTQ's layout"
        )
    overrides = dynamic_overrides(fields, gptq_scheme)
    scheme = gptq_scheme(fields)
    schemes = (scheme, *overrides.schemes)
    has_groups = any(own is not None and own.desc_act for own in schemes)
    return QuantizationConfig(
        "gptq",
        (Rule(_targets(fields), scheme),),
        overrides,
        has_head=fields.get("lm_head", bool, False),
        # Quantization tools write zero biases for layers without biases.
        ignored_suffixes=(".bias", *(() if has_groups else (".g_idx",))),
    )


def gptq_scheme(fields: Fields) -> WeightScheme:
    """The scheme of modules with the settings `fields`. Raises ConfigError."""
    bits, size = integer_bits(fields, "bits"), group_size(fields, "group_size")
    desc_act = fields.get("desc_act", bool, False) and size is not None
    # Version gptq stores zero points minus 1.
    offset = 0 if fields.raw.get("checkpoint_format") == VERSION_2 else 1
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
    # Symmetric checkpoints also store zero points.
    fields.get("sym", bool, True)
    return WeightScheme(bits, parts, group_size=size, desc_act=desc_act)


def _targets(fields: Fields) -> tuple[str, ...]:
    lists = fields.get("modules_in_block_to_quantize", list, [])
    names = [name for entry in lists for name in (entry if isinstance(entry, list) else [entry])]
    if not all(isinstance(name, str) for name in names):
        raise refused(fields, "modules_in_block_to_quantize", lists, "lists of names of modules")
    return checked_names(fields, "modules_in_block_to_quantize", tuple(names)) or ("Linear",)


def _packing(packing: str, settings: Fields) -> Packing | None:
    is_plain = packing in _PLAIN_PACKINGS or "gptqmodel" in packing
    # AutoRound uses this packing by default, so an empty name is accepted.
    if packing and not is_plain and "gptq" not in packing:
        return None
    # In model-free mode, AutoRound stores zero points minus 1 for every packing_format (0.15.1,
    # quantize_weight_rtn).
    version = VERSION_2 if is_plain and not settings.raw.get("model_free") else None
    raw = {**settings.raw, "desc_act": False, "checkpoint_format": version}
    return Fields(raw, settings.file), gptq_scheme


FORMATS = {
    "gptq": QuantizationFormat(
        read=read_gptq,
        spellings=("gptq_marlin", "gptq_hpu", "marlin", "moe_wna16"),
        file="quantize_config.json",
        auto_round=_packing,
    )
}
