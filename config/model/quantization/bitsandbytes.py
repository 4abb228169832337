"""bitsandbytes checkpoints: 4 bits (nf4, fp4), with scales in 8 bits or not, and LLM.int8.

Of 4 bits, a weight is a list of numbers in the order of memory, in blocks with a scale each, so a
rank cannot read its part alone: hpu/model_loader/bitsandbytes.py decodes the whole weight.
"""

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
SCB_FACTOR = 1 / 127
"""Factor of 8-bit scales, which are stored as largest magnitudes."""


def read_bitsandbytes(fields: Fields) -> QuantizationConfig:
    """Quantization of bitsandbytes checkpoints. Raises ConfigError for unsupported settings."""
    has_8_bits = fields.get("load_in_8bit", bool, False)
    if has_8_bits == fields.get("load_in_4bit", bool, False):
        raise refused(fields, "load_in_4bit", not has_8_bits, "either this or load_in_8bit")
    return QuantizationConfig(
        "bitsandbytes",
        (Rule(("Linear",), _eight_bits() if has_8_bits else _four_bits(fields)),),
        ignored=module_names(fields, "llm_int8_skip_modules"),
        # Without a list, bitsandbytes does not quantize the head; a list names all unquantized
        # modules.
        has_head=fields.raw.get("llm_int8_skip_modules") is not None,
        ignored_suffixes=(".weight_format",),
    )


def _four_bits(fields: Fields) -> WeightScheme:
    kind = choice(fields, "bnb_4bit_quant_type", "fp4", ("nf4", "fp4"))
    choice(fields, "bnb_4bit_quant_storage", "uint8", ("uint8",))
    is_nested = fields.get("bnb_4bit_use_double_quant", bool, False)
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
        # Early checkpoints have no quant_method.
        read=read_bitsandbytes,
        marks=("load_in_4bit", "load_in_8bit"),
    )
}
