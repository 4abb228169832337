"""bitsandbytes checkpoints: 4 bits (nf4, fp4), with or without 8-bit scales, and LLM.int8. A 4-bit
weight is stored flat in memory order, with a scale per block."""

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
from config.model.quantization.fields import FLOATS, choice, module_names, refused

BLOCK, NESTED_BLOCK = 64, 256
"""Weights per scale, and scales per nested scale."""
NF4 = "nf4"
SCB_FACTOR = 1 / 127
"""Factor of the 8-bit format's scales, which are stored as maximum magnitudes."""


def read_bitsandbytes(fields: Fields) -> QuantizationConfig:
    """Quantization of bitsandbytes checkpoints. Raises ConfigError."""
    has_8_bits = fields.get("load_in_8bit", bool, False)
    if has_8_bits == fields.get("load_in_4bit", bool, False):
        wanted = f"{not has_8_bits}, since load_in_8bit is {has_8_bits}"
        raise refused(fields, "load_in_4bit", has_8_bits, wanted)
    return QuantizationConfig(
        "bitsandbytes",
        (Rule(("Linear",), _eight_bits() if has_8_bits else _four_bits(fields)),),
        ignored=module_names(fields, "llm_int8_skip_modules"),
        # bitsandbytes does not quantize the head by default; with a list, it skips only the listed
        # modules.
        has_head=fields.raw.get("llm_int8_skip_modules") is not None,
        ignored_suffixes=(".weight_format",),
    )


def _four_bits(fields: Fields) -> WeightScheme:
    kind = choice(fields, "bnb_4bit_quant_type", "fp4", ("nf4", "fp4"))
    choice(fields, "bnb_4bit_quant_storage", "uint8", ("uint8",))
    return four_bit_scheme(kind, is_nested=fields.get("bnb_4bit_use_double_quant", bool, False))


def four_bit_scheme(kind: str, *, is_nested: bool = False) -> WeightScheme:
    """Scheme of 4-bit weights with the code table `kind`. `is_nested`: scales have 8 bits."""
    parts: tuple[WeightPart, ...] = (
        WeightPart("values", "weight", (), ("U8",), bits=4, flat=2),
        WeightPart("blocks", "weight.absmax", (), ("U8" if is_nested else "F32",), flat=BLOCK),
        WeightPart("codes", "weight.quant_map", (), ("F32",)),
        WeightPart("state", f"weight.quant_state.bitsandbytes__{kind}", (), ("U8",)),
    )
    if is_nested:
        flat = BLOCK * NESTED_BLOCK
        parts += (
            WeightPart("nested_blocks", "weight.nested_absmax", (), ("F32",), flat=flat),
            WeightPart("nested_codes", "weight.nested_quant_map", (), ("F32",)),
        )
    return WeightScheme(4, parts, is_flat=True)


def _eight_bits() -> WeightScheme:
    outputs, inputs = StoredAxis(OUTPUTS), StoredAxis(INPUTS)
    return WeightScheme(
        8,
        (
            WeightPart("values", "weight", (outputs, inputs), ("I8",), bits=8, offset=128),
            WeightPart(
                "scales", "SCB", (outputs, StoredAxis(INPUTS, 0)), FLOATS, factor=SCB_FACTOR
            ),
        ),
    )


FORMATS = {
    "bitsandbytes": QuantizationFormat(
        read=read_bitsandbytes,
        # Early checkpoints have no quant_method.
        marks=("load_in_4bit", "load_in_8bit"),
        # NF4 without double quantization, which is off by default in transformers, too.
        at_load=(four_bit_scheme(NF4),),
    )
}
