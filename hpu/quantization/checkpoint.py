"""CheckpointScheme: the methods of a model whose checkpoint is quantized."""

from collections.abc import Callable

from config.checkpoint.weight_maps.shard import Shard
from config.model.quantization.base import INPUTS
from hpu.quantization.base import LinearMethod
from hpu.quantization.stored import StoredWeight
from hpu.quantization.unquantized import UNQUANTIZED

MakeMethod = Callable[[StoredWeight], LinearMethod | None]
"""The method by which a device multiplies a quantized weight; None: it does not."""


class CheckpointScheme:
    """A layer keeps its weight quantized if the device multiplies such weights, and all that is
    merged into it is quantized alike; other weights are dequantized while they are loaded."""

    serves_experts = True

    def __init__(self, make_method: MakeMethod) -> None:
        self._make_method = make_method

    def linear_method(
        self, shards: list[Shard], in_features: int, *, is_head: bool
    ) -> LinearMethod:
        values = [one for one in shards if one.spec.part and one.spec.part.role == "values"]
        schemes = {one.spec.scheme for one in shards}
        if not values or len(schemes) > 1:
            return UNQUANTIZED
        spec, scheme = values[0].spec, schemes.pop()
        assert scheme is not None
        is_split = values[0].intervals is not None
        if is_head and is_split:
            # The shard of the last rank is filled up with rows that no scale has.
            return UNQUANTIZED
        sizes = spec.output_sizes or (spec.shape[0],)
        stored = StoredWeight(
            scheme,
            in_features,
            sum(sizes),
            values[0].total if is_split and values[0].dim == INPUTS else in_features,
            sizes,
        )
        return self._make_method(stored) or UNQUANTIZED
