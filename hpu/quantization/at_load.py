"""AtLoadScheme: quantizes unquantized weights to a checkpoint format while loading, and uses the
methods of that format."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.shard import Shard
from config.model.quantization.base import PARAMETERS, QuantizationConfig, Role, WeightScheme
from config.model.quantization.registry import config_at_load
from hpu.model_loader.bitsandbytes import decode_flat, encode_nf4
from hpu.quantization.base import (
    ExpertsLayer,
    ExpertsShards,
    LinearLayer,
    LinearMethod,
    LinearShards,
    MoEMethod,
)
from hpu.quantization.stored.checkpoint import MakeMethod, MakeMoEMethod
from hpu.quantization.stored.fp8 import quantize_outputs
from hpu.quantization.stored.weights import W2, W13, StoredExperts, StoredWeight
from hpu.quantization.unquantized import (
    UNQUANTIZED,
    UNQUANTIZED_MOE,
    HostLinearMethod,
    HostMoEMethod,
)

QUANTIZERS: dict[str, Callable[[Tensor], dict[Role, Tensor]]] = {
    "fp8": quantize_outputs,
    "bitsandbytes": encode_nf4,
}
"""Format -> quantizer of a weight (out, in) to the tensors of its scheme."""


class AtLoadScheme:
    """Scheme that quantizes the linear layers and the experts of an unquantized checkpoint, except
    NEVER_QUANTIZED, to the format `name` of SCHEMES_AT_LOAD. If the device has no method for the
    format, the quantized weights are dequantized again."""

    def __init__(self, name: str, make_method: MakeMethod, make_moe_method: MakeMoEMethod) -> None:
        self._name = name
        self._config: QuantizationConfig = config_at_load(name)
        is_flat = any(scheme.is_flat for scheme in self._config.schemes)
        self._make_method: MakeMethod = _no_method if is_flat else make_method
        self._make_moe_method: MakeMoEMethod = _no_method if is_flat else make_moe_method

    def linear_method(self, weight: LinearShards) -> LinearMethod:
        scheme = self._scheme_of(weight.shards)
        if weight.is_head or not scheme:
            return UNQUANTIZED
        return AtLoadLinearMethod(scheme, QUANTIZERS[self._name], self._make_method)

    def moe_method(self, experts: ExpertsShards) -> MoEMethod:
        scheme = self._scheme_of([*experts.w13, *experts.w2])
        assert scheme, "experts are always quantized"
        return AtLoadMoEMethod(
            scheme, QUANTIZERS[self._name], self._make_moe_method, activation=experts.activation
        )

    def _scheme_of(self, shards: list[Shard]) -> WeightScheme | None:
        modules = (shard.spec.name.removesuffix(".weight") for shard in shards)
        schemes = {self._config.scheme_of(module) for module in modules}
        return schemes.pop() if len(schemes) == 1 else None


class AtLoadLinearMethod(HostLinearMethod):
    """LinearMethod that loads the unquantized weight; `process_weights` replaces it by the method
    of the quantized weight."""

    def __init__(
        self,
        scheme: WeightScheme,
        quantize: Callable[[Tensor], dict[Role, Tensor]],
        make_method: MakeMethod,
    ) -> None:
        self._scheme = scheme
        self._quantize = quantize
        self._make_method = make_method

    def process_weights(self, layer: LinearLayer) -> None:
        assert isinstance(layer.weight, Tensor)
        plain = layer.weight.detach()
        stored = _stored(self._scheme, plain)
        method = self._make_method(stored)
        parts = self._quantize(plain)
        if not method:
            layer.method = UNQUANTIZED
            rounded = _dequantized(stored, parts).to(layer.dtype).to(layer.device)
            layer.weight = nn.Parameter(rounded, requires_grad=False)
            return
        layer.weight = None
        layer.method = method
        _register(layer, "", parts)
        method.process_weights(layer)


class AtLoadMoEMethod(HostMoEMethod):
    """MoEMethod that loads the unquantized experts, like AtLoadLinearMethod."""

    def __init__(
        self,
        scheme: WeightScheme,
        quantize: Callable[[Tensor], dict[Role, Tensor]],
        make_method: MakeMoEMethod,
        *,
        activation: str,
    ) -> None:
        """`activation`: see StoredExperts."""
        self._scheme = scheme
        self._quantize = quantize
        self._make_method = make_method
        self._activation = activation

    def process_weights(self, layer: ExpertsLayer) -> None:
        plain = {prefix: layer.get_parameter(f"{prefix}weight").detach() for prefix in (W13, W2)}
        layer.w13_weight = layer.w2_weight = None
        w13, w2 = (_stored(self._scheme, stack[0]) for stack in plain.values())
        experts = StoredExperts(w13, w2, layer.num_experts, self._activation)
        method = self._make_method(experts)
        for prefix, weight in experts.named_weights:
            stack = plain.pop(prefix)
            if not method:
                for own in stack:
                    # In place: a second copy of all experts would not fit in memory.
                    own.copy_(_dequantized(weight, self._quantize(own)))
                name = f"{prefix}weight"
                on_device = nn.Parameter(stack.to(layer.device), requires_grad=False)
                layer.register_parameter(name, on_device)
                continue
            _register(layer, prefix, _stacked([self._quantize(own) for own in stack]))
        layer.method = method or UNQUANTIZED_MOE
        layer.method.process_weights(layer)


def _no_method(weight: object) -> None:
    """MakeMethod and MakeMoEMethod for flat formats: no device has a method for them."""


def _stored(scheme: WeightScheme, plain: Tensor) -> StoredWeight:
    out_features, in_features = plain.shape
    return StoredWeight(scheme, in_features, out_features, in_features, (out_features,))


def _dequantized(stored: StoredWeight, parts: Mapping[Role, Tensor]) -> Tensor:
    """(out, in) float32."""
    if stored.scheme.is_flat:
        return decode_flat(parts, (stored.out_features, stored.in_features), "a weight")
    return stored.dequantize(parts)


def _stacked(experts: list[dict[Role, Tensor]]) -> dict[Role, Tensor]:
    return {role: torch.stack([parts[role] for parts in experts]) for role in experts[0]}


def _register(layer: LinearLayer | ExpertsLayer, prefix: str, parts: Mapping[Role, Tensor]) -> None:
    """Set the parameters of `layer` that loading a quantized checkpoint would fill."""
    for role, tensor in parts.items():
        parameter = nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(prefix + PARAMETERS[role], parameter)
