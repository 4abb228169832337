"""PoolingModel: a model for its hidden states, and what makes vectors of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from config.model.model_config import ModelConfig
from config.model.pooler import PoolerConfig
from hpu.layers.linear import Linear
from hpu.model_loader.loader import load_weights
from hpu.model_loader.weight_map import Place, parts
from hpu.models.decoder import Decoder
from hpu.models.encoder import Encoder
from hpu.models.pooler import Pooler
from hpu.models.registry import build_body
from hpu.worker.offloaded_weights import Kept, put_back


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """Both parts; a checkpoint's tensors belong to either."""

    body: Encoder | Decoder
    pooler: Pooler

    def places(self) -> Iterator[tuple[str, Place]]:
        """Every tensor the checkpoint must hold."""
        yield from self.body.places()
        yield from self.pooler.places()

    def own_name(self, name: str) -> str:
        return self.body.own_name(name)

    def may_skip(self, name: str) -> bool:
        return self.body.may_skip(name)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.body, self.pooler)

    @property
    def weight_bytes(self) -> int:
        """Of all parameters and tables."""
        return sum(
            tensor.numel() * tensor.element_size()
            for module in self.modules
            for tensor in (*module.parameters(), *module.buffers())
        )


class _Dense:
    """The one product of a folder of sentence-transformers."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def places(self) -> Iterator[tuple[str, Place]]:
        return parts("", self._linear, {"linear": self._linear.out_size})

    def own_name(self, name: str) -> str:
        return name

    def may_skip(self, name: str) -> bool:
        return False


def load_pooling_model(
    config: ModelConfig,
    pooler: PoolerConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    on_progress: Callable[[int, int], None],
    kept: Kept | None = None,
) -> PoolingModel:
    """The model with its weights, and those of the modules behind it, from their files unless they
    were `kept`. Raises ConfigError."""
    body = build_body(config, dtype=dtype, device=device, max_model_len=max_model_len)
    model = PoolingModel(body, Pooler(pooler, config, device))
    if kept is not None:
        put_back(kept, model.modules)
        return model
    load_weights(model, config.path, on_progress=on_progress)
    for dense, linear in zip(pooler.dense, model.pooler.dense, strict=True):
        assert isinstance(linear, Linear)
        load_weights(_Dense(linear), dense.folder, on_progress=lambda done, total: None)
    return model
