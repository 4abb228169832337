"""LayerMethods: chooses the methods of a decoder's linear layers and experts."""

from config.checkpoint.weight_maps.base import WeightMap
from config.checkpoint.weight_maps.shard import Shard, shard_of
from config.errors import ConfigError
from config.model.model_config import ModelConfig
from hpu.distributed.process_groups import shard_rank
from hpu.models.base import ModelBuild
from hpu.quantization.base import (
    ExpertsShards,
    LinearMethod,
    LinearShards,
    MoEMethod,
    QuantizationScheme,
)
from hpu.quantization.unquantized import UNQUANTIZED, UNQUANTIZED_MOE


class LayerMethods:
    """Methods of a decoder without quantization."""

    def linear(self, path: str, in_features: int, *, is_head: bool = False) -> LinearMethod:
        """Method of the linear layer at `path`, which has `in_features` inputs on this rank."""
        return UNQUANTIZED

    def experts(self, path: str, inner_size: int, activation: str) -> MoEMethod:
        """Method of the stacked experts at `path`, with `inner_size` features on this rank. Raises
        ConfigError."""
        return UNQUANTIZED_MOE


class QuantizedMethods(LayerMethods):
    """Methods that a quantization scheme chooses by the checkpoint tensors of each layer."""

    def __init__(
        self,
        config: ModelConfig,
        build: ModelBuild,
        weight_map: WeightMap,
        scheme: QuantizationScheme,
    ) -> None:
        self._config = config
        self._scheme = scheme
        self._shards: dict[str, list[Shard]] = {}
        """Shards of this rank by parameter."""
        at = shard_rank(build.group, build.expert_group)
        for spec in weight_map.entries():
            shard = shard_of(spec, at)
            if shard is not None:
                self._shards.setdefault(spec.parameter, []).append(shard)

    def linear(self, path: str, in_features: int, *, is_head: bool = False) -> LinearMethod:
        weight = LinearShards(self._shards[f"{path}.weight"], in_features, is_head=is_head)
        return self._scheme.linear_method(weight)

    def experts(self, path: str, inner_size: int, activation: str) -> MoEMethod:
        method = self._scheme.moe_method(
            ExpertsShards(
                self._shards[f"{path}.w13_weight"],
                self._shards[f"{path}.w2_weight"],
                self._config.hidden_size,
                inner_size,
                activation,
            )
        )
        if method is None:
            raise ConfigError(
                f"{self._config.path} is a mixture of experts, for which quantization is not "
                "supported: leave quantization out"
            )
        return method


def layer_methods(config: ModelConfig, build: ModelBuild, weight_map: WeightMap) -> LayerMethods:
    if build.quantization is None:
        return LayerMethods()
    return QuantizedMethods(config, build, weight_map, build.quantization)
