"""`quant_method` of a checkpoint -> reader of its quantization_config."""

from collections.abc import Callable, Mapping

from config.errors import ConfigError
from config.model.json_fields import Fields, shown
from config.model.quantization.auto_round import read_auto_round
from config.model.quantization.awq import read_awq
from config.model.quantization.base import QuantizationConfig
from config.model.quantization.bitsandbytes import read_bitsandbytes
from config.model.quantization.compressed_tensors import read_compressed_tensors
from config.model.quantization.fbgemm_fp8 import read_fbgemm_fp8
from config.model.quantization.fields import quantization_fields
from config.model.quantization.fp8 import read_fp8, read_mxfp8
from config.model.quantization.gptq import read_gptq
from config.model.quantization.modelopt import read_modelopt

METHODS: Mapping[str, Callable[[Fields], QuantizationConfig]] = {
    "gptq": read_gptq,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm_fp8,
    "mxfp8": read_mxfp8,
    "modelopt": read_modelopt,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "bitsandbytes": read_bitsandbytes,
}


def read_quantization(fields: Fields, known: tuple[str, ...] = ()) -> QuantizationConfig | None:
    """How the checkpoint with the config.json `fields` is quantized; None for weights that are not
    quantized, or quantized by a method in `known`, which the model's family reads. Raises
    ConfigError for a method that is not served."""
    own = quantization_fields(fields)
    if own is None:
        return None
    method = own.raw["quant_method"]
    if method in known:
        return None
    if not isinstance(method, str) or method not in METHODS:
        named = shown(method)[1:-1] if isinstance(method, str) else "method unnamed"
        raise ConfigError(
            f"{own.file} says that its weights are quantized ({named}): served are "
            f"{', '.join(METHODS)}, and weights in bfloat16, float16 and float32"
        )
    return METHODS[method](own)


def is_served(fields: Fields) -> bool:
    """Whether `read_quantization` supports the method in config.json."""
    own = quantization_fields(fields)
    return own is not None and own.raw["quant_method"] in METHODS
