"""NVIDIA Model Optimizer: FP8 (e4m3) with per-tensor weight and activation scales, and MXFP8."""

import re

from config.json_text import Json
from config.model.json_fields import Fields
from config.model.quantization.base import EXPRESSION, QuantizationConfig, QuantizationFormat, Rule
from config.model.quantization.fields import KV_SCALES, choice, module_names
from config.model.quantization.fp8 import fp8_scheme, mxfp8_scheme


def read_modelopt(fields: Fields) -> QuantizationConfig:
    """Read quantization_config of config.json, or hf_quant_config.json, where the list of ignored
    modules is called exclude_modules. Raises ConfigError."""
    if choice(fields, "quant_algo", None, ("FP8", "MXFP8")) == "MXFP8":
        scheme = mxfp8_scheme("weight_scale")
    else:
        scheme = fp8_scheme(
            fields, "quant_algo", None, rows=0, suffix="weight_scale", activations="static"
        )
    names = module_names(fields, "ignore", "exclude_modules")
    return QuantizationConfig(
        "modelopt",
        (Rule(("Linear",), scheme),),
        ignored=tuple(_pattern(name) for name in names),
        ignored_suffixes=KV_SCALES,
    )


def _pattern(name: str) -> str:
    """`name` as an entry of QuantizationConfig.ignored, with * as a wildcard."""
    if "*" not in name or name.startswith(EXPRESSION):
        return name
    return EXPRESSION + ".*".join(re.escape(part) for part in name.split("*")) + "$"


def _in_file(content: Fields) -> Json | None:
    settings: Json = content.get("quantization", dict, {})
    # null: only the KV cache is FP8.
    return None if settings.get("quant_algo") is None else settings


FORMATS = {
    # Early checkpoints have the settings only in this file.
    "modelopt": QuantizationFormat(
        read=read_modelopt, file="hf_quant_config.json", in_file=_in_file
    )
}
