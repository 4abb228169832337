"""fbgemm_fp8 checkpoints (Llama 3.1 405B, Llama 4 Maverick): e4m3 with a scale per output channel.
gate_up_proj and down_proj of the experts are stacked tensors, transposed like unquantized weights
(FbgemmFp8Llama4TextExperts in transformers/integrations/fbgemm_fp8.py)."""

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
from config.model.quantization.fields import FLOATS, module_names
from config.model.quantization.fp8 import fp8_scheme


def read_fbgemm_fp8(fields: Fields) -> QuantizationConfig:
    """Quantization of fbgemm_fp8 checkpoints. activation_scale_ub, an upper bound for clipping
    activations, is ignored: activations are at least as exact without it. Raises ConfigError."""
    scheme = fp8_scheme(fields, "", None, rows=1, suffix="weight_scale", activations="dynamic")
    outputs, inputs = StoredAxis(OUTPUTS), StoredAxis(INPUTS)
    stacked = WeightScheme(
        8,
        (
            WeightPart("values", "", (inputs, outputs), ("F8_E4M3",)),
            WeightPart("scales", "_scale", (StoredAxis(INPUTS, 0), outputs), FLOATS),
        ),
        is_float=True,
        activations="dynamic",
    )
    return QuantizationConfig(
        "fbgemm_fp8",
        (Rule(("Linear",), scheme),),
        ignored=module_names(fields, "modules_to_not_convert"),
        stacked=stacked,
    )


FORMATS = {"fbgemm_fp8": QuantizationFormat(read=read_fbgemm_fp8)}
