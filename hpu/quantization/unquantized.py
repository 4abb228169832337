"""UnquantizedLinearMethod and UnquantizedMoEMethod: weights in the model's dtype, as loaded.
UnquantizedMoEMethod also dequantizes and multiplies quantized weights that no kernel supports."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpu.quantization.base import ExpertsLayer, LinearLayer


class UnquantizedLinearMethod:
    """LinearMethod that keeps the weights as loaded."""

    def create_weights(self, layer: LinearLayer, in_features: int, out_features: int) -> None:
        empty = torch.empty(out_features, in_features, dtype=layer.dtype, device=layer.device)
        layer.weight = nn.Parameter(empty, requires_grad=False)

    def process_weights(self, layer: LinearLayer) -> None:
        return

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        assert layer.weight is not None
        return functional.linear(x, layer.weight, bias)


UNQUANTIZED = UnquantizedLinearMethod()


class HostLinearMethod(UnquantizedLinearMethod):
    """LinearMethod that loads the weight into host memory, from which it is quantized."""

    def create_weights(self, layer: LinearLayer, in_features: int, out_features: int) -> None:
        empty = torch.empty(out_features, in_features, dtype=layer.dtype)
        layer.weight = nn.Parameter(empty, requires_grad=False)


class UnquantizedMoEMethod:
    """MoEMethod that keeps the weights as loaded. Sums over experts are float32."""

    def create_weights(
        self, layer: ExpertsLayer, num_experts: int, hidden_size: int, inner_size: int
    ) -> None:
        def empty(rows: int, columns: int) -> nn.Parameter:
            weight = torch.empty(num_experts, rows, columns, dtype=layer.dtype, device=layer.device)
            return nn.Parameter(weight, requires_grad=False)

        layer.w13_weight = empty(2 * inner_size, hidden_size)
        layer.w2_weight = empty(hidden_size, inner_size)

    def process_weights(self, layer: ExpertsLayer) -> None:
        return

    def apply(self, layer: ExpertsLayer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        experts = _apply_to_chosen if hidden.device.type == "cpu" else _apply_to_all
        return experts(layer, hidden, ids, weights.float()).to(hidden.dtype)


def _expert(layer: ExpertsLayer, index: int, hidden: Tensor) -> Tensor:
    """Output (T, hidden) float32 of an expert for `hidden` (T, hidden)."""
    w13, w2 = weights_of(layer, index, hidden.dtype)
    w13_bias, w2_bias = (
        None if bias is None else bias[index] for bias in (layer.w13_bias, layer.applied_w2_bias)
    )
    inner = layer.activation(functional.linear(hidden, w13, w13_bias))
    return functional.linear(inner, w2, w2_bias).float()


def weights_of(layer: ExpertsLayer, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both weights of an expert; quantized weights are dequantized to `dtype`."""
    if layer.quantized_weights is not None:
        w13, w2 = (stack[index].dequantize(dtype) for stack in layer.quantized_weights)
        return w13, w2
    assert layer.w13_weight is not None and layer.w2_weight is not None
    return layer.w13_weight[index], layer.w2_weight[index]


def _apply_to_chosen(layer: ExpertsLayer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Each expert runs only on the tokens that are routed to it. The host reads the number of
    tokens."""
    out = torch.zeros_like(hidden, dtype=torch.float32)
    order = ids.flatten().argsort(stable=True)
    num_experts = layer.num_experts
    # Tokens that are routed to experts of other ranks sort last.
    counts = ids.flatten().bincount(minlength=num_experts).tolist()[:num_experts]
    order = order[: sum(counts)]
    tokens, weights = order // ids.shape[1], weights.flatten()[order].unsqueeze(-1)
    chosen = [index for index, count in enumerate(counts) if count]
    sizes = [counts[index] for index in chosen]
    groups = zip(
        chosen, tokens.split_with_sizes(sizes), weights.split_with_sizes(sizes), strict=True
    )
    for index, rows, scale in groups:
        out.index_add_(0, rows, _expert(layer, index, hidden[rows]) * scale)
    return out


def _apply_to_all(layer: ExpertsLayer, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Each expert runs on all tokens, so that no shape depends on the routing. Slow; for experts
    without a kernel on devices other than the CPU."""
    out = torch.zeros_like(hidden, dtype=torch.float32)
    for index in range(layer.num_experts):
        is_chosen = ids == index
        scale = (weights * is_chosen).sum(-1, keepdim=True)
        # Not addcmul: the vendor's compile back end excludes it from compiled graphs.
        out = out + of_chosen(_expert(layer, index, hidden) * scale, is_chosen)
    return out


def of_chosen(output: Tensor, is_chosen: Tensor) -> Tensor:
    """The `output` (T, hidden) of an expert for the tokens that are routed to it (any of
    `is_chosen` (T, experts per token)), else 0. Not multiplied by 0: the expert may overflow for
    other tokens."""
    return torch.where(is_chosen.any(-1, keepdim=True), output, 0)


UNQUANTIZED_MOE = UnquantizedMoEMethod()


class HostMoEMethod(UnquantizedMoEMethod):
    """MoEMethod that loads the weights of stacked experts into host memory, like
    HostLinearMethod."""

    def create_weights(
        self, layer: ExpertsLayer, num_experts: int, hidden_size: int, inner_size: int
    ) -> None:
        def empty(rows: int, columns: int) -> nn.Parameter:
            weight = torch.empty(num_experts, rows, columns, dtype=layer.dtype)
            return nn.Parameter(weight, requires_grad=False)

        layer.w13_weight = empty(2 * inner_size, hidden_size)
        layer.w2_weight = empty(hidden_size, inner_size)
