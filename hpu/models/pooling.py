"""PoolingModel: a model without an output head, and the pooler that turns its hidden states into
vectors."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.checkpoint.weight_maps.encoder import head_weights
from config.model.model_config import ModelConfig
from config.model.pooler import PoolerConfig
from hpu.layers.linear import LinearBase
from hpu.model_loader.dummy_weights import fill_dummy
from hpu.model_loader.loader import Progress, load_weights
from hpu.model_loader.offloaded_weights import OffloadedWeights, restore
from hpu.models.base import ModelBuild
from hpu.models.decoder import Decoder
from hpu.models.encoder import Encoder
from hpu.models.pooler import Pooler
from hpu.models.registry import build_body


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """Body and pooler. A single checkpoint holds the tensors of both, except the Dense modules of
    sentence-transformers, which have their own folders."""

    body: Encoder | Decoder
    pooler: Pooler

    @property
    def weight_map(self) -> WeightMap:
        body, head = self.body.weight_map, self.pooler.head
        if head is None:
            return body
        weights = head_weights(self.body.config, head.out.out_features)
        specs = (spec._replace(parameter=f"head.{spec.parameter}") for spec in weights)
        return replace(body, outer=(*body.outer, *specs))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.body.named_parameters()
        yield from self.pooler.named_parameters()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.body, self.pooler)


class _Dense:
    """The linear layer of a sentence-transformers Dense module."""

    def __init__(self, linear: LinearBase) -> None:
        self._linear = linear

    @property
    def weight_map(self) -> WeightMap:
        return WeightMap(
            tuple(
                WeightSpec(f"linear.{name}", tuple(parameter.shape), name)
                for name, parameter in self.named_parameters()
            )
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._linear.named_parameters()


def load_pooling_model(
    config: ModelConfig,
    pooler: PoolerConfig,
    build: ModelBuild,
    *,
    on_progress: Progress,
    offloaded: OffloadedWeights | None = None,
    is_dummy: bool = False,
) -> PoolingModel:
    """Load the model and its pooler modules: from their files, from `offloaded` weights, or with
    random weights (`is_dummy`). The layers are sharded over the tensor-parallel ranks; the pooler
    is replicated. Raises ConfigError and CheckpointError."""
    body = build_body(config, build)
    model = PoolingModel(body, Pooler(pooler, config, build.device))
    if offloaded is not None:
        restore(offloaded, model.modules)
        return model
    if is_dummy:
        fill_dummy(model.modules, on_progress=on_progress)
        return model
    load_weights(model, config.path, on_progress=on_progress, group=build.group)
    for dense, linear in zip(pooler.dense, model.pooler.dense, strict=True):
        assert isinstance(linear, LinearBase)
        load_weights(_Dense(linear), dense.folder, on_progress=lambda done, total: None)
    return model
