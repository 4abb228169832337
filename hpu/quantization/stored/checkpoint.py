"""CheckpointScheme: the methods of a model whose checkpoint is quantized."""

from collections.abc import Callable

from config.checkpoint.weight_maps.shard import Shard
from config.model.quantization.base import INPUTS
from hpu.quantization.base import ExpertsShards, LinearMethod, LinearShards, MoEMethod
from hpu.quantization.stored.mxfp4 import Mxfp4Experts
from hpu.quantization.stored.weights import StoredExperts, StoredWeight
from hpu.quantization.unquantized import UNQUANTIZED, UNQUANTIZED_MOE

MakeMethod = Callable[[StoredWeight], LinearMethod | None]
"""Creates a device's LinearMethod for a quantized weight; None: the device does not support the
weight."""
MakeMoEMethod = Callable[[StoredExperts | Mxfp4Experts], MoEMethod | None]
"""Creates a device's MoEMethod for quantized experts; None: the device does not support the
experts."""


class CheckpointScheme:
    """A weight stays quantized if the device has a method for it and all tensors merged into the
    layer have the same quantization; other weights, and a head divided among ranks, are dequantized
    while loading."""

    def __init__(
        self, make_method: MakeMethod, make_moe_method: MakeMoEMethod = lambda experts: None
    ) -> None:
        self._make_method = make_method
        self._make_moe_method = make_moe_method

    def linear_method(self, weight: LinearShards) -> LinearMethod:
        stored = _stored_weight(weight.shards, weight.in_features)
        is_shard = any(shard.intervals is not None for shard in weight.shards)
        # The head shard of the last rank is padded with rows that have no scale.
        if stored is None or (weight.is_head and is_shard):
            return UNQUANTIZED
        return self._make_method(stored) or UNQUANTIZED

    def moe_method(self, experts: ExpertsShards) -> MoEMethod:
        hidden_size, inner_size, w2 = experts.hidden_size, experts.inner_size, experts.w2
        if any(shard.spec.mxfp4 for shard in w2):
            method = self._make_moe_method(Mxfp4Experts.of(w2, hidden_size, inner_size))
            return method or UNQUANTIZED_MOE
        stored_weights = _stored_weight(experts.w13, hidden_size), _stored_weight(w2, inner_size)
        if stored_weights[0] is None or stored_weights[1] is None:
            return UNQUANTIZED_MOE
        num_experts = w2[0].spec.num_experts or len({shard.spec.expert for shard in w2})
        stored = StoredExperts(
            stored_weights[0], stored_weights[1], num_experts, experts.activation
        )
        return self._make_moe_method(stored) or UNQUANTIZED_MOE


def _stored_weight(shards: list[Shard], in_features: int) -> StoredWeight | None:
    """Common StoredWeight of all `shards`, of a linear layer or of the experts of a layer; None if
    the shards are not quantized, differ in their quantization, or are stored as flat blocks."""
    values = [shard for shard in shards if shard.spec.part and shard.spec.part.role == "values"]
    schemes = {shard.spec.scheme for shard in shards}
    if not values or len(schemes) > 1:
        return None
    first, scheme = next(values[0].each_expert()), schemes.pop()
    assert scheme is not None
    if scheme.is_flat:
        return None
    sizes = first.spec.output_sizes or (first.spec.shape[0],)
    is_split = first.intervals is not None and first.dim == INPUTS
    total = first.total if is_split else in_features
    return StoredWeight(scheme, in_features, sum(sizes), total, sizes)
