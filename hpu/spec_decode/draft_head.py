"""DraftHead: base class of draft heads with a KV cache.

Position i of a head reads token i + 1 of the text and the target's hidden state of token i. The
output replaces the target's hidden state of token i + 1 where the target has not computed it.
"""

from typing import Any

from torch import Tensor

from config.checkpoint.weight_maps.base import WeightMap
from config.parallel import Stage
from hpu.layers.attention_base import Shape
from hpu.layers.linear import ReplicatedLinear
from hpu.layers.metadata import AttentionInputs
from hpu.models.base import CausalLM, LoadableModel
from hpu.models.decoder import Decoder
from hpu.models.decoder_layer import DecoderLayer
from hpu.ops.kernels import Kernels
from hpu.quantization.kv_cache import KVCacheFormat


class LastLayer(Stage):
    """Pipeline stage that has only the last layer and receives hidden states."""

    def layers(self, num_layers: int) -> range:
        return range(num_layers - 1, num_layers)


LAST_LAYER = LastLayer(1, 2)


class DraftHead(LoadableModel):
    """Decoder with a single layer. It shares the embedding of the target and usually its output
    head. The constructor of a subclass takes a Decoder that has only the last layer (LAST_LAYER),
    the ModelConfig of the target, and the weight map."""

    def __init__(
        self, decoder: Decoder, weight_map: WeightMap, *, hidden_width: int, in_features: int
    ) -> None:
        """`hidden_width`: width of the target's hidden states that the head reads per token.
        `in_features`: inputs of the projection."""
        super().__init__()
        self.weight_map = weight_map
        self.config, self.dtype = decoder.config, decoder.dtype
        self.hidden_width = hidden_width
        self.model = decoder.model
        # In a list, so that it is not a submodule: its parameters are registered through
        # `model`.
        self._decoder = [decoder]
        self._target: list[CausalLM] = []
        hidden = decoder.config.hidden_size
        options: dict[str, Any] = {"dtype": decoder.dtype, "device": decoder.device}
        self.fc = ReplicatedLinear(in_features, hidden, **options)

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """Target layers before which the head reads hidden states; empty: it reads the hidden
        states after the last norm."""
        return ()

    def bind_target(self, target: CausalLM) -> None:
        """Draft for `target`."""
        self._target = [target]

    def combine(self, hidden: Tensor) -> Tensor:
        """(M, hidden_width) of the target -> (M, hidden), the input of `draft`."""
        return hidden

    def draft(
        self, tokens: Tensor, inputs: AttentionInputs, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`tokens` (B, Q) and hidden states (B, Q, hidden) of the tokens before them -> two (B, Q,
        hidden) tensors: the input of `logits`, and the input of the next `draft`."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        return self._target[0].logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor | None:
        return self._target[0].argmax(hidden)

    def tokens_of(self, chosen: Tensor) -> Tensor:
        """Map (M,) indices of logits to token ids; -1 stays -1."""
        return chosen

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, Q) -> (B, Q, hidden)."""
        return self._target[0].embed(tokens)

    @property
    def layers(self) -> list[DecoderLayer]:
        return self._decoder[0].layers

    def use_kernels(self, kernels: Kernels, *, split_qkv: bool = False) -> None:
        """Switch to the device's fused kernels; see Decoder.use_kernels."""
        self._decoder[0].use_kernels(kernels, split_qkv=split_qkv)

    def use_kv_cache_format(self, format: KVCacheFormat) -> None:
        self._decoder[0].use_kv_cache_format(format)

    def cache_shapes(
        self, num_blocks: int, block_size: int, num_rings: int = 0
    ) -> list[tuple[Shape, ...]]:
        return self._decoder[0].cache_shapes(num_blocks, block_size, num_rings)

    def cache_windows(self) -> list[int | None]:
        return self._decoder[0].cache_windows()

    def bind_caches(
        self, caches: list[tuple[Tensor, ...]], block_size: int, num_rings: int = 0
    ) -> None:
        self._decoder[0].bind_caches(caches, block_size, num_rings)
