"""Data types of the KV cache, as --kv-cache-dtype names them. Imports no torch."""

AUTO, BFLOAT16, FLOAT16, FP8, FP8_INC, INT8 = KV_CACHE_DTYPES = (
    "auto",
    "bfloat16",
    "float16",
    "fp8",
    "fp8_inc",
    "int8",
)
SPELLINGS = {"fp8_e4m3": FP8, "half": FLOAT16}

ON_GAUDI = (AUTO, BFLOAT16, FLOAT16, FP8, FP8_INC)

INT8_SCALE_BYTES = 4
"""Of the float32 scale behind the numbers of a head of a token."""

_WIDTHS = {BFLOAT16: 2, FLOAT16: 2, FP8: 1, FP8_INC: 1}


def kv_width(kv_cache_dtype: str, model_width: int) -> int:
    """Bytes of a number in a cache without scales beside the numbers: all but int8. `model_width`:
    those of a number in the model."""
    return model_width if kv_cache_dtype == AUTO else _WIDTHS[kv_cache_dtype]
