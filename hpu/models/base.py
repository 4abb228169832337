"""CausalLM: interface of the model that a worker runs, plain or wrapped by a back end.
CompiledAdapters: LoRA slots of a model that a back end compiles. ModelBuild: how a model is built
on a rank. LoadableModel: a model that a checkpoint fills."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.base import WeightMap
from config.errors import ConfigError
from config.model.model_config import ModelConfig
from config.parallel import WHOLE, Stage
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.layers.attention_base import Shape
from hpu.layers.cross_attention import CrossAttention
from hpu.layers.linear import LinearBase
from hpu.layers.metadata import AttentionInputs
from hpu.layers.non_finite import NonFiniteGuard
from hpu.layers.state_cache import StateCacheSpec
from hpu.quantization.base import QuantizationScheme
from hpu.quantization.kv_cache import KVCacheFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBuild:
    """How a model is built on this rank."""

    dtype: torch.dtype
    device: torch.device
    max_model_len: int | None = None
    """Maximum sequence length to serve, in tokens; None: the checkpoint's maximum. It sizes the
    rotary table, and some rope scalings depend on it."""
    quantization: QuantizationScheme | None = None
    group: ProcessGroup = SINGLE
    """Tensor-parallel ranks."""
    expert_group: ProcessGroup = SINGLE
    """Ranks over which whole experts are distributed; with a single rank, `group` shards each
    expert."""
    stage: Stage = WHOLE
    """Pipeline stage. A decoder has the layers of its stage, the embedding on the first stage, and
    norm, head and an embedding tied to the head on the last stage."""

    def length(self, config: ModelConfig) -> int:
        """Maximum sequence length of a model of `config`."""
        return config.max_position if self.max_model_len is None else self.max_model_len


class CompiledAdapters:
    """LoRA slots of a compiled model. This base class is for a model that runs layer by layer; the
    slots of its layers hold all adapters."""

    names: Mapping[LinearBase, str] = MappingProxyType({})
    """Layers for which the compiled model supports adapters, with a name for each."""

    def pack(self, staged: Mapping[str, Sequence[Tensor]]) -> Mapping[str, Any]:
        """Pack the results of PerAdapterSlots.stage, by `names`, for `set`. Runs on the thread that
        reads the adapter."""
        return {}

    def set(self, slot: int, packed: Mapping[str, Any], *, is_whole: bool) -> None:
        """Load an adapter into `slot`: its packed weights by name. `is_whole`: whether the compiled
        model supports all weights of the adapter; if False, launches with the adapter run layer by
        layer."""


class CausalLM(nn.Module):
    """Decoder with paged KV caches, fixed-size states for layers that have states, and an output
    head."""

    config: ModelConfig
    dtype: torch.dtype
    hidden_width: int = 0
    """Width of the target's hidden states that a draft head reads per token; 0: this model is not a
    draft head."""

    def forward(self, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        """Normed hidden states (B, Q, hidden) of `tokens` (B, Q), or of embeddings (B, Q, hidden),
        as input of `logits`. A pipeline stage before the last returns the input of the next stage.
        A model with deepstack (VisionFacts) also accepts embeddings (B, Q, (1 + deepstack layers) *
        hidden)."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """(M, hidden) -> (M, vocab), in the model's dtype or in float32."""
        raise NotImplementedError

    def argmax(self, hidden: Tensor) -> Tensor | None:
        """Greedy tokens: (M, hidden) -> (M,). The lowest id wins a tie; -1 where the largest
        logit is not finite. None: not available, use `logits`."""
        return None

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings (B, Q, hidden) of (B, Q) tokens, without position embeddings."""
        raise NotImplementedError

    @property
    def image_multiplier(self) -> float:
        """Embedding multiplier that also applies to image embeddings."""
        return 1.0

    def keep_hidden_states(self, layers: tuple[int, ...]) -> None:
        """Make each later `forward` keep the hidden states before `layers` in `kept_hidden_states`.
        Called once, before the caches are bound. Raises ConfigError if the model does not support
        it."""
        raise ConfigError(
            "the model runs on the transformers implementation, which returns no hidden states"
        )

    @property
    def kept_hidden_states(self) -> Tensor | None:
        """Hidden states kept by the last `forward`, (B, Q, layers * hidden), layer by layer;
        None without `keep_hidden_states`, and on a pipeline stage other than the last."""
        return None

    @property
    def received_width(self) -> int:
        """Width of the input that a pipeline stage receives per token instead of tokens: hidden
        states, followed by the kept hidden states of earlier stages."""
        return self.config.hidden_size

    def cache_shapes(
        self, num_blocks: int, block_size: int, num_rings: int = 0
    ) -> list[tuple[Shape, ...]]:
        """Shapes of the key and value caches (and of the cache of index keys, if any), or of the
        latent cache, of each layer with a cache. With `num_rings`, layers that have a window in
        `cache_windows` have `num_rings` rings, each for the window of a request, instead of
        `num_blocks` blocks."""
        raise NotImplementedError

    def cache_windows(self) -> list[int | None]:
        """Maximum tokens that a query sees, including itself, by layer of `cache_shapes`. None:
        all tokens, or the cache must hold the whole context."""
        raise NotImplementedError

    def bind_caches(
        self, caches: list[tuple[Tensor, ...]], block_size: int, num_rings: int = 0
    ) -> None:
        """Use the caches of each layer, with the shapes of `cache_shapes`. With `num_rings`,
        launches contain the request index of each sequence (padding: `num_rings` - 1), and a
        prefill must not run twice on the same inputs."""
        raise NotImplementedError

    def make_adapters(self, max_loras: int, max_rank: int) -> CompiledAdapters:
        """The LoRA slots that the model reads. Called once, before the caches are bound."""
        return CompiledAdapters()

    def state_specs(self) -> list[StateCacheSpec]:
        """Specs of the layers with a state. Launches of such a model contain state indices and must
        run only once: a second run on the same inputs would advance the states again."""
        return []

    def bind_states(self, states: list[tuple[Tensor, ...]]) -> None:
        """Use the states of each layer, with the specs of `state_specs`. Called only for models
        with states."""
        raise NotImplementedError

    @property
    def non_finite_guard(self) -> NonFiniteGuard | None:
        """Guard of a model whose attention zeroes non-finite values. None: attention does not
        zero them, or this is a pipeline stage other than the last."""
        return None

    @property
    def cross_attentions(self) -> list[CrossAttention]:
        return []

    def zero_non_finite(self) -> None:
        """Enable zeroing of non-finite queries, keys and values in attention: 0 * NaN would leak
        from slots that a token does not see. `non_finite_guard` then makes the hidden states of the
        affected prompt NaN. Called before the first launch."""
        raise NotImplementedError

    def read_contiguously(self) -> None:
        """Read the caches of a decode as a single slice: entry i of its block inputs must then
        describe block i. Called once, before the first launch."""
        raise NotImplementedError


class LoadableModel(CausalLM):
    """Model with allocated, unfilled parameters, which a checkpoint fills."""

    weight_map: WeightMap

    def keep_embedding(self) -> None:
        """Create the token embedding on this pipeline stage, even if it is not the first. Called
        once, before the weights are loaded."""
        raise NotImplementedError

    def use_kv_cache_format(self, format: KVCacheFormat) -> None:
        """Cache keys and values in `format`. Called once, before the weights are loaded."""
        raise NotImplementedError
