"""CausalLM: what a worker runs, as the model itself or as a back end's faster form of it."""

import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.base import WeightMap
from config.errors import ConfigError
from config.model.model_config import ModelConfig
from hpu.layers.attention_base import Shape
from hpu.layers.cross_attention import CrossAttention
from hpu.layers.metadata import AttentionInputs
from hpu.layers.non_finite import NonFiniteGuard
from hpu.layers.state_cache import StateCacheSpec
from hpu.quantization.kv_cache import KVCacheFormat


class CausalLM(nn.Module):
    """A decoder over paged KV caches, and states of fixed size for layers that have them, with an
    output head."""

    config: ModelConfig
    dtype: torch.dtype
    hidden_width: int = 0
    """Of a drafter: numbers of the target's hidden states that it reads for each token."""

    def forward(self, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        """Hidden states (B, Q, hidden) of `tokens` (B, Q), or of embeddings (B, Q, hidden) in their
        place, normed and ready for `logits`. A model with deepstack (VisionFacts) also takes
        embeddings (B, Q, (1 + deepstack layers) * hidden)."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """(M, hidden) to (M, vocab), in the model's dtype or in float32."""
        raise NotImplementedError

    def argmax(self, hidden: Tensor) -> Tensor | None:
        """(M, hidden) to (M,): the tokens of the largest logits, the first of equal ones, -1 where
        that logit is not finite. None: only `logits` can tell."""
        return None

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, Q) tokens to (B, Q, hidden), as the first layer reads them."""
        raise NotImplementedError

    @property
    def image_multiplier(self) -> float:
        """What the model multiplies the embeddings of images with, beside those of tokens."""
        return 1.0

    def keep_hidden_states(self, layers: tuple[int, ...]) -> None:
        """From now on each `forward` leaves the hidden states in front of `layers` in
        `kept_hidden_states`. Once, before the caches are bound. ConfigError if the model cannot."""
        raise ConfigError("the code of transformers runs the model, and gives no hidden states")

    @property
    def kept_hidden_states(self) -> Tensor | None:
        """(B, Q, layers * hidden) of the last `forward`, those of the layers side by side; None
        without `keep_hidden_states`, and on a pipeline stage that is not the last."""
        return None

    @property
    def received_width(self) -> int:
        """Numbers of each token that a pipeline stage receives in place of tokens: hidden states,
        and behind them those of earlier stages that `keep_hidden_states` names."""
        return self.config.hidden_size

    def cache_shapes(
        self, num_blocks: int, block_size: int, num_rings: int = 0
    ) -> list[tuple[Shape, ...]]:
        """Shapes of the key cache and the value cache, or of the cache of latents, of each layer
        that has them. With `num_rings`, those of `cache_windows` have so many rings, each for the
        window of one request, in place of `num_blocks` blocks."""
        raise NotImplementedError

    def cache_windows(self) -> list[int | None]:
        """Of each layer of `cache_shapes`: the most tokens that a query sees, its own included;
        None: all, or its cache must hold the whole context."""
        raise NotImplementedError

    def bind_caches(
        self, caches: list[tuple[Tensor, ...]], block_size: int, num_rings: int = 0
    ) -> None:
        """Use each layer's caches, of `cache_shapes`. With `num_rings` launches name the request
        index of each sequence, below `num_rings` - 1, which is that of padding; a prefill must not
        run again on the same inputs."""
        raise NotImplementedError

    def state_specs(self) -> list[StateCacheSpec]:
        """Of each layer with a state. Their launches name states, and run once each: another run on
        the same inputs would advance the states again."""
        return []

    def bind_states(self, states: list[tuple[Tensor, ...]]) -> None:
        """Use each layer's states, of `state_specs`. Only if there are any."""
        raise NotImplementedError

    @property
    def non_finite_guard(self) -> NonFiniteGuard | None:
        """That of a model whose attention zeroes what is not finite; None on pipeline stages that
        are not the last."""
        return None

    @property
    def cross_attentions(self) -> list[CrossAttention]:
        """Of the layers that read images."""
        return []

    def read_contiguously(self) -> None:
        """From now on entry i of a decode describes block i of the caches, which are read as one
        slice. Once, before the first launch."""
        raise NotImplementedError


class LoadableModel(CausalLM):
    """A model as it is built: its parameters are allocated, and a checkpoint fills them."""

    weight_map: WeightMap

    def keep_embedding(self) -> None:
        """Have the embedding of tokens on this pipeline stage, whichever it is. Once, before the
        weights are loaded."""
        raise NotImplementedError

    def use_kv_cache_format(self, format: KVCacheFormat) -> None:
        """Cache keys and values in `format`. Once, before the weights are loaded."""
        raise NotImplementedError
