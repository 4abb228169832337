"""Fp8LinearMethod: FP8 weights of a checkpoint on Gaudi, multiplied in FP8."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from config.model.quantization.base import Role
from hpu.quantization.base import LinearLayer
from hpu.quantization.stored import StoredMethod, StoredWeight

CHECKPOINT_MAX = 448.0
"""Largest value of e4m3 in checkpoints."""
MIN_AMAX = 1e-8
"""Added to the largest activation of a token, which may be 0."""


class Range(NamedTuple):
    """Of e4m3 on a card."""

    largest: float

    @property
    def halves(self) -> bool:
        """Whether it ends below that of checkpoints: weights are halved, and scales doubled, so
        that no code of a larger value is ever on the card."""
        return self.largest < CHECKPOINT_MAX


class Fp8LinearMethod(StoredMethod):
    """A LinearMethod of torch.ops.hpu.cast_to_fp8_v2 and fp8_gemm_v2 (HabanaAI/gaudi-pytorch-
    bridge), with a scale of each output. Activations are scaled by token, or, where the checkpoint
    has a scale for them, by that. Scales of blocks are replaced by scales of outputs: weights are
    rounded again, on the host."""

    def __init__(self, weight: StoredWeight, largest: float) -> None:
        """`largest`: of the card's e4m3."""
        super().__init__(weight)
        self._range = Range(largest)
        self._is_static = weight.scheme.activations == "static"

    def process_weights(self, layer: LinearLayer) -> None:
        parts = self._weight.take_parameters(layer)
        values, scales = self._per_output(parts)
        tensors = {"qweight": values, "scales": scales.flatten()}
        if self._is_static:
            # One scale for all that multiply the same activations.
            scale = parts["input_scale"].max()
            if self._range.halves:
                scale = scale * 2
            tensors["input_scale"] = scale.reshape(1)
            tensors["input_multiplier"] = 1 / scale.reshape(1)
        for name, tensor in tensors.items():
            on_device = tensor.contiguous().to(layer.device)
            layer.register_parameter(name, nn.Parameter(on_device, requires_grad=False))

    def _per_output(self, parts: dict[Role, Tensor]) -> tuple[Tensor, Tensor]:
        """(out, in) float8_e4m3fn in the card's range, and scales (out, 1) float32."""
        values, scales = parts["values"], parts["scales"]
        if scales.shape[1] > 1:
            plain = self._weight.dequantize(parts)
            scales = plain.abs().amax(1, keepdim=True).clamp_min_(MIN_AMAX) / self._range.largest
            return to_fp8(plain / scales, self._range.largest), scales
        if self._range.halves:
            return to_fp8(values.float() / 2, self._range.largest), scales * 2
        return values, scales

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scale: Tensor
        multiplier: Tensor
        if self._is_static:
            scale = layer.get_parameter("input_scale")
            multiplier = layer.get_parameter("input_multiplier")
        else:
            amax = rows.abs().amax(-1, keepdim=True).float()
            scale = (amax + MIN_AMAX) / self._range.largest
            multiplier = torch.reciprocal(scale)
        narrow, _ = torch.ops.hpu.cast_to_fp8_v2(
            rows, multiplier, False, False, torch.float8_e4m3fn
        )
        out: Tensor = torch.ops.hpu.fp8_gemm_v2(
            narrow,
            False,
            layer.get_parameter("qweight"),
            True,
            None,
            x.dtype,
            scale,
            layer.get_parameter("scales"),
            bias,
            False,
        )
        return out.view(*x.shape[:-1], -1)


def to_fp8(values: Tensor, largest: float) -> Tensor:
    return values.clamp(-largest, largest).to(torch.float8_e4m3fn)
