"""FP8 weights of a checkpoint on Gaudi. Fp8LinearMethod and Fp8MoEMethod multiply in FP8;
Fp8BlockLinearMethod and Fp8BlockMoEMethod dequantize in each launch with the checkpoint's scales,
per block or per output."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from config.errors import CheckpointError
from config.model.quantization.base import Role
from hpu.ops.gaudi_modules import MOE_ACTIVATIONS
from hpu.quantization.base import ExpertsLayer, LinearLayer
from hpu.quantization.stored.weights import (
    W2,
    W13,
    StoredExperts,
    StoredMethod,
    StoredMoEMethod,
    StoredWeight,
    each_expert,
    register,
)

CHECKPOINT_MAX = 448.0
"""Largest e4m3 value in checkpoints."""
MIN_AMAX = 1e-8
"""Avoids a scale of 0: added to the amax of a token, and lower bound of the amax of a weight."""


class Fp8Range(NamedTuple):
    """Range of e4m3 on a card."""

    largest: float
    converts: bool = True
    """Whether weights are converted to the smaller range while loading; False: the checkpoint has
    been converted."""

    @property
    def halves(self) -> bool:
        """Whether weights are halved and scales doubled while loading, so that the card never holds
        a value beyond its range, which is smaller than the range of checkpoints."""
        return self.converts and self.largest < CHECKPOINT_MAX

    def per_output(
        self, weight: StoredWeight, parts: Mapping[Role, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """From the `parts` of a weight: values (out, in) float8_e4m3fn in the card's range, and
        scales (out, 1) float32."""
        values, scales = parts["values"], parts["scales"]
        if scales.shape[1] > 1:
            own = quantize_outputs(weight.dequantize(parts), self.largest)
            return own["values"], own["scales"]
        return self.fitted(values, scales)

    def fitted(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """`values` in the card's range, and matching scales. Raises CheckpointError for values
        beyond the range that are not converted."""
        if self.halves:
            return halved(values), scales * 2
        if self.largest < (most := self._most(values)):
            raise CheckpointError(
                f"the checkpoint has FP8 weights of up to {most:g}, and FP8 of this card ends at "
                f"{self.largest:g}: set --convert-to-fp8uz, or convert the checkpoint "
                "(`gaudiserve quantize --to fp8-gaudi2`)"
            )
        return values, scales

    def _most(self, values: Tensor) -> float:
        """Largest magnitude of `values`; 0 on a card with the range of checkpoints, where it is not
        needed."""
        return float(values.float().abs().amax()) if self.largest < CHECKPOINT_MAX else 0.0

    def input_scale(self, stored: Tensor) -> Tensor:
        """Scale of activations for the card, from the checkpoint's scale."""
        return stored * 2 if self.halves else stored

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize `rows` (T, in) to float8_e4m3fn with a scale per row: (T, 1) float32."""
        amax = rows.abs().amax(-1, keepdim=True).float()
        scale = (amax + MIN_AMAX) / self.largest
        return cast_to_fp8(rows, torch.reciprocal(scale)), scale


class Fp8LinearMethod(StoredMethod):
    """LinearMethod with torch.ops.hpu.cast_to_fp8_v2 and fp8_gemm_v2
    (HabanaAI/gaudi-pytorch-bridge), with a scale per output. Activations use the checkpoint's
    static scale if there is one, else a scale per token. Block scales are replaced by scales per
    output: the host rounds the weights again."""

    def __init__(self, weight: StoredWeight, fp8_range: Fp8Range) -> None:
        super().__init__(weight)
        self._range = fp8_range
        self._is_static = weight.scheme.activations == "static"

    def process_weights(self, layer: LinearLayer) -> None:
        parts = self._weight.take_parameters(layer)
        values, scales = self._range.per_output(self._weight, parts)
        tensors = {"qweight": values, "scales": scales.flatten()}
        if self._is_static:
            # A single scale for all weights that multiply the same activations.
            scale = self._range.input_scale(parts["input_scale"].max().reshape(1))
            tensors["input_scale"] = scale
            tensors["input_multiplier"] = 1 / scale
        register(layer, {name: tensor.contiguous() for name, tensor in tensors.items()})

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scale: Tensor
        if self._is_static:
            scale = layer.get_parameter("input_scale")
            narrow = cast_to_fp8(rows, layer.get_parameter("input_multiplier"))
        else:
            narrow, scale = self._range.quantize(rows)
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


def quantize_outputs(weight: Tensor, largest: float = CHECKPOINT_MAX) -> dict[Role, Tensor]:
    """Quantize `weight` (out, in): values (out, in) float8_e4m3fn up to `largest`, and scales
    (out, 1) float32."""
    plain = weight.float()
    scales = plain.abs().amax(1, keepdim=True).clamp_min_(MIN_AMAX) / largest
    return {"values": to_fp8(plain / scales, largest), "scales": scales}


def halved(values: Tensor) -> Tensor:
    """FP8 `values` divided by 2: at most half of CHECKPOINT_MAX."""
    return to_fp8(values.float() / 2, CHECKPOINT_MAX)


def to_fp8(values: Tensor, largest: float) -> Tensor:
    return values.clamp(-largest, largest).to(torch.float8_e4m3fn)


def cast_to_fp8(rows: Tensor, multiplier: Tensor) -> Tensor:
    """`rows` times `multiplier`, cast to FP8 by the card."""
    narrow: Tensor = torch.ops.hpu.cast_to_fp8_v2(
        rows, multiplier, False, False, torch.float8_e4m3fn
    )[0]
    return narrow


class Fp8MoEMethod(StoredMoEMethod):
    """MoEMethod with the FP8 forms of torch.ops.hpu.mixture_of_experts, with a scale per output of
    each expert, like Fp8LinearMethod. Static activation scales: w13 uses the largest scale of this
    rank's experts, w2 uses each expert's own scale (vllm_gaudi/extension/ops.py in
    vllm-project/vllm-gaudi)."""

    def __init__(self, experts: StoredExperts, fp8_range: Fp8Range) -> None:
        """`experts` must satisfy `can_multiply`."""
        super().__init__(experts)
        self._range = fp8_range
        self._is_static = experts.w13.scheme.activations == "static"

    def process_weights(self, layer: ExpertsLayer) -> None:
        tensors: dict[str, Tensor] = {}
        for prefix, weight in self._experts.named_weights:
            parts = weight.take_parameters(layer, prefix)
            values, scales = parts["values"], torch.empty(parts["values"].shape[:2])
            for index, own in enumerate(each_expert(parts)):
                # In place: a second copy of all experts would not fit in memory.
                codes, outputs = self._range.per_output(weight, own)
                values[index].copy_(codes)
                scales[index].copy_(outputs.flatten())
            tensors |= {f"{prefix}qweight": values, f"{prefix}scales": scales}
            if self._is_static:
                stored = self._range.input_scale(parts["input_scale"].amax((1, 2)))
                tensors[f"{prefix}input_scale"] = stored if prefix == W2 else stored.max()
        if self._is_static:
            tensors["input_multiplier"] = 1 / tensors[f"{W13}input_scale"]
        register(layer, tensors)
        layer.moe_op = VllmMixtureOfExpertsOpFP8PerChannel(layer, self._range, self._is_static)


class VllmMixtureOfExpertsOpFP8PerChannel(nn.Module):
    """MoEImpl: the vendor's kernel for a layer's routed experts in FP8. The kernel quantizes the
    inputs of w2, per token or with the static scale of the expert."""

    def __init__(self, layer: ExpertsLayer, fp8_range: Fp8Range, is_static: bool) -> None:
        """Holds views of the parameters of `layer`, so the parameters must not be moved later."""
        super().__init__()

        def views(name: str) -> list[Tensor]:
            return list(layer.get_parameter(name).detach().unbind(0))

        self._range = fp8_range
        self._w13, self._w13_scales = views(f"{W13}qweight"), views(f"{W13}scales")
        self._w2, self._w2_scales = views(f"{W2}qweight"), views(f"{W2}scales")
        self.experts_min = layer.first_expert
        self.experts_max = layer.first_expert + len(self._w13) - 1
        self._static: tuple[Tensor, Tensor, list[Tensor]] | None = None
        if is_static:
            self._static = (
                layer.get_parameter(f"{W13}input_scale").detach(),
                layer.get_parameter("input_multiplier").detach(),
                views(f"{W2}input_scale"),
            )

    def forward(
        self,
        hidden_states: Tensor,
        expert_routing_table: Tensor,
        router_weights: Tensor,
        permuted_weights: bool = True,
        activation: str = "silu",
    ) -> Tensor:
        scales: dict[str, Tensor | list[Tensor]]
        if self._static is None:
            narrow, scale = self._range.quantize(hidden_states)
            scales = {"d_scale_hidden_states": scale}
        else:
            scale, multiplier, inner = self._static
            narrow = cast_to_fp8(hidden_states, multiplier)
            scales = {
                "d_scale_hidden_states": scale,
                "d_scale_intermediate_hidden_states": inner,
            }
        # Overload selected by name: overload resolution in torch would print the arguments, and
        # they do not fit the other overloads.
        forms = torch.ops.hpu.mixture_of_experts
        form = forms.fp8_fused_weights if self._static else forms.fp8_fused_weights_dynamic
        out: Tensor = form(
            hidden_states=narrow,
            expert_routing_table=expert_routing_table,
            router_weights=router_weights,
            w12=self._w13,
            w3=self._w2,
            d_scale_w12=self._w13_scales,
            d_scale_w3=self._w2_scales,
            permuted_weights=permuted_weights,
            activation=MOE_ACTIVATIONS[activation],
            experts_min=self.experts_min,
            experts_max=self.experts_max,
            **scales,
        )
        return out


def can_multiply(experts: StoredExperts) -> bool:
    """Whether the FP8 forms of the kernel support `experts`."""
    floats = experts.w13.scheme.is_float and experts.w2.scheme.is_float
    return floats and experts.activation in MOE_ACTIVATIONS


class Fp8BlockLinearMethod(StoredMethod):
    """LinearMethod that keeps the checkpoint's scales (doubled on a card for which weights are
    halved) and dequantizes the weight to the activations' dtype in each launch."""

    def __init__(self, weight: StoredWeight, fp8_range: Fp8Range) -> None:
        """`weight` must satisfy `can_stay`."""
        super().__init__(weight)
        self._range = fp8_range

    def process_weights(self, layer: LinearLayer) -> None:
        parts = self._weight.take_parameters(layer)
        values, scales = self._range.fitted(parts["values"], parts["scales"])
        register(layer, {"qweight": values, "scales": scales})

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        operands = layer.get_parameter("qweight"), layer.get_parameter("scales")
        return functional.linear(x, expand_blocks(operands, x.dtype), bias)


class Fp8BlockMoEMethod(StoredMoEMethod):
    """MoEMethod with mixture_of_experts that dequantizes the experts in each launch, like
    Fp8BlockLinearMethod."""

    def __init__(
        self,
        experts: StoredExperts,
        fp8_range: Fp8Range,
        end_slice: Callable[[], None] = lambda: None,
    ) -> None:
        """`experts` must satisfy `can_multiply`, and both weights `can_stay`. `end_slice`: see
        ExpandedExperts."""
        super().__init__(experts)
        self._range = fp8_range
        self._end_slice = end_slice

    def process_weights(self, layer: ExpertsLayer) -> None:
        for prefix, weight in self._experts.named_weights:
            parts = weight.take_parameters(layer, prefix)
            for own in each_expert(parts):
                # In place, for the same reason as in Fp8MoEMethod.
                fitted = self._range.fitted(own["values"], own["scales"])
                own["values"].copy_(fitted[0])
                own["scales"].copy_(fitted[1])
            tensors = {"qweight": parts["values"], "scales": parts["scales"]}
            register(layer, {prefix + name: tensor for name, tensor in tensors.items()})
        layer.moe_op = self._experts.expanding_op(
            layer,
            ["qweight", "scales"],
            expand_blocks,
            permuted_weights=True,
            end_slice=self._end_slice,
        )


def expand_blocks(operands: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Dequantize FP8 values (out, in) with scales (out, groups) to (out, in), rounded once."""
    values, scales = operands
    grouped = values.float().view(*scales.shape, -1) * scales.unsqueeze(-1)
    return grouped.view(values.shape).to(dtype)


def can_stay(weight: StoredWeight) -> bool:
    """Whether the weight can be dequantized with its own scales: it is in floats, and its groups
    divide this rank's inputs evenly."""
    return weight.scheme.is_float and weight.in_features % weight.num_groups == 0


def has_blocks(weight: StoredWeight) -> bool:
    """Whether the weight has block scales."""
    return weight.scheme.is_float and weight.scheme.group_size is not None


def is_weight_only(weight: StoredWeight) -> bool:
    """Whether only weights are FP8 in the checkpoint, so that activations must not be quantized."""
    return weight.scheme.is_float and weight.scheme.activations == "none"
