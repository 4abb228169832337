"""torch.ops.hpu: the schemas and kernels of the device's own ops, registered while the emulator is
in place. Knows no tensors."""

from torch.library import Library

from hpu.emulator.ops import kernels
from hpu.emulator.ops import quantized as quantised


def define_ops(fp8_max: float) -> Library:
    """Defines and implements every op; the ops are gone when the library is destroyed."""
    library = Library("hpu", "DEF")  # type: ignore[no-untyped-call]  # torch's own
    fp8 = quantised.Fp8(fp8_max)
    table = {
        kernels.SDPA: kernels.sdpa,
        kernels.RMS_NORM: kernels.rms_norm,
        kernels.RMS_NORM_FAST: kernels.rms_norm,
        kernels.ROTARY: kernels.rotary,
        kernels.CUSTOM_SOFTMAX: kernels.custom_softmax,
        kernels.BLOCK_SOFTMAX: kernels.block_softmax,
        kernels.BLOCK_SOFTMAX_ADJUSTMENT: kernels.block_softmax_adjustment,
        quantised.FROM_UINT4: quantised.convert_from_uint4,
        quantised.FROM_INT4: quantised.convert_from_int4,
        quantised.MOE: quantised.mixture_of_experts,
        quantised.MOE_FUSED: quantised.mixture_of_experts_fused,
    }
    for name, scale in quantised.OVERLOADS:
        table[quantised.CAST_TO.format(name=name, scale=scale)] = fp8.cast_to
        table[quantised.CAST_FROM.format(name=name, scale=scale)] = fp8.cast_from
        table[quantised.GEMM.format(name=name, scale=scale)] = fp8.gemm
    for schema, kernel in table.items():
        library.define(schema)  # type: ignore[no-untyped-call]  # torch's own
        library.impl(schema.partition("(")[0], kernel, "CPU")  # type: ignore[no-untyped-call]  # torch's own
    return library
