"""Dtypes of the KV cache, named as in --kv-cache-dtype. Imports no torch."""

AUTO, BFLOAT16, FLOAT16, FP8, FP8_INC, INT8 = KV_CACHE_DTYPES = (
    "auto",
    "bfloat16",
    "float16",
    "fp8",
    "fp8_inc",
    "int8",
)
SPELLINGS = {"fp8_e4m3": FP8, "half": FLOAT16, "hf8": FP8_INC}
"""Alternative names of dtypes. hf8 is the name of fp8_inc in scripts of 2024."""

ON_GAUDI = (AUTO, BFLOAT16, FLOAT16, FP8, FP8_INC)

INT8_SCALE_BYTES = 4
"""Bytes of the float32 scale after the int8 values of each head and token."""

_WIDTHS = {BFLOAT16: 2, FLOAT16: 2, FP8: 1, FP8_INC: 1}


def kv_width(kv_cache_dtype: str, model_width: int) -> int:
    """Bytes per element of a KV cache without inline scales (every dtype except int8).
    `model_width`: bytes per element of the model's dtype."""
    return model_width if kv_cache_dtype == AUTO else _WIDTHS[kv_cache_dtype]
