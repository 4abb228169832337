"""Decoder shared by all built-in families of generating models; DecoderSpec describes the
differences.

Embedding; layers of attention (or a recurrence) and an MLP or a mixture of experts
(decoder_layer.py); norm; head. Module paths follow vLLM's Llama, so that calibration files made
with vLLM can be used.
"""

from collections.abc import Callable
from itertools import islice

import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.decoder import decoder_weight_map
from config.checkpoint.weight_maps.kv_scales import with_kv_scales
from config.model.decoder_spec import DecoderSpec
from config.model.model_config import ModelConfig
from hpu.layers.attention_base import AttentionLayer, Shape
from hpu.layers.cross_attention import CrossAttention
from hpu.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from hpu.layers.metadata import (
    AttentionInputs,
    AttentionMetadata,
    rotated_positions,
)
from hpu.layers.metadata_builder import MetadataBuilder
from hpu.layers.moe import MoE
from hpu.layers.non_finite import NonFiniteGuard, nan_tensor
from hpu.layers.norm import LayerNorm, RMSNorm
from hpu.layers.state_cache import StateCacheSpec
from hpu.models.base import LoadableModel, ModelBuild
from hpu.models.decoder_layer import DecoderLayer, StateLayer
from hpu.models.layer_builder import LayerBuilder
from hpu.ops.kernels import Kernels
from hpu.ops.rope import RotaryEmbedding, Rotation
from hpu.quantization.kv_cache import KVCacheFormat

PlaceLayer = Callable[[int, DecoderLayer], None]
"""Moves the parameters of a new layer, given its number, to the memory that holds them."""


def leave_in_place(index: int, layer: DecoderLayer) -> None:
    """A PlaceLayer that moves nothing."""


class DecoderModel(nn.Module):
    """Tokens to normed hidden states. On a pipeline stage: tokens, or hidden states of the
    previous stage, to hidden states."""

    def __init__(
        self,
        embed_tokens: VocabParallelEmbedding | None,
        layers: dict[int, DecoderLayer],
        norm: RMSNorm | LayerNorm | None,
        metadata: MetadataBuilder,
        rotary_embs: dict[str, RotaryEmbedding],
        ropes: list[str],
        embed_positions: VocabParallelEmbedding | None,
        hidden_size: int,
    ) -> None:
        """`layers`: by layer number in the whole model, which stays in the module path.
        `rotary_embs`: by rope name. `ropes`: rope name of each layer. `norm`: None except on the
        last stage."""
        super().__init__()
        self.embed_tokens = embed_tokens
        self.embed_positions = embed_positions
        self.layers = nn.ModuleList()
        for number, layer in layers.items():
            self.layers.add_module(str(number), layer)
        self.norm = norm
        self.metadata = metadata
        self.rotary_emb = rotary_embs.get("default")
        self.local_rotary_emb = rotary_embs.get("local")
        self._ropes = ropes
        self.input_width = hidden_size
        """Width of the first layer's input per token."""
        self.kept_layers: tuple[int, ...] = ()
        self._numbers = tuple(layers)
        self.kept: Tensor | None = None
        """Hidden states for CausalLM.kept_hidden_states."""
        self.guard: NonFiniteGuard | None = None
        """Set on the last stage if attention zeroes non-finite values."""

    @property
    def rotary_embs(self) -> list[RotaryEmbedding]:
        both = (self.rotary_emb, self.local_rotary_emb)
        return [rotary for rotary in both if rotary is not None]

    def forward(self, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        """(B, Q) tokens, or (B, Q, hidden) embeddings or hidden states, to (B, Q, hidden). For
        wider embeddings (B, Q, n * hidden), the first layer reads the first `hidden` numbers; the
        following parts are added to the outputs of the first n - 1 layers (DeepStack, 2024). With
        `kept_layers`, a pipeline stage before the last appends to its output the hidden states
        before all `kept_layers` up to its last layer; the next stage receives them as the parts
        after the first."""
        rotations = self._rotations(inputs)
        metadata: AttentionMetadata = self.metadata(inputs)
        is_embedded = tokens.dim() > 2
        hidden = tokens if is_embedded else self._embed(tokens, inputs.positions)
        if is_embedded and hidden.shape[-1] != self.input_width:
            hidden, *further = torch.split(hidden, self.input_width, dim=-1)
            return self._end(self._one_by_one(hidden, rotations, metadata, further), inputs)
        if self.kept_layers:
            return self._end(self._one_by_one(hidden, rotations, metadata, []), inputs)
        for layer, rope in zip(self.layers, self._ropes, strict=True):
            hidden = layer(hidden, rotations.get(rope), metadata)
        return self._end(hidden, inputs)

    def _end(self, hidden: Tensor, inputs: AttentionInputs) -> Tensor:
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden if self.guard is None else self.guard(hidden, inputs)

    def part(self, first: int, end: int, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        """Run layers `first` to `end` - 1 of this stage. `tokens`: tokens if `first` is 0,
        otherwise hidden states. The last layer is followed by the norm and guard of `forward`."""
        rotations = self._rotations(inputs)
        metadata: AttentionMetadata = self.metadata(inputs)
        hidden = tokens if first else self._embed(tokens, inputs.positions)
        for layer, rope in islice(zip(self.layers, self._ropes, strict=True), first, end):
            hidden = layer(hidden, rotations.get(rope), metadata)
        return self._end(hidden, inputs) if end == len(self.layers) else hidden

    def _rotations(self, inputs: AttentionInputs) -> dict[str, Rotation]:
        rotated = rotated_positions(inputs)
        rotations: dict[str, Rotation] = {}
        if self.rotary_emb is not None:
            rotations["default"] = self.rotary_emb(rotated)
        if self.local_rotary_emb is not None:
            rotations["local"] = self.local_rotary_emb(rotated)
        return rotations

    def _one_by_one(
        self,
        hidden: Tensor,
        rotations: dict[str, Rotation],
        metadata: AttentionMetadata,
        further: list[Tensor],
    ) -> Tensor:
        """Run the layers and keep the hidden states before `kept_layers`. `further`: hidden
        states that earlier stages kept, then tensors to add to the outputs of the first layers."""
        kept = dict(zip(self.received_layers, further, strict=False))
        added = further[len(self.received_layers) :]
        columns = zip(self._numbers, self.layers, self._ropes, strict=True)
        for index, (number, layer, rope) in enumerate(columns):
            if number in self.kept_layers:
                kept[number] = hidden
            hidden = layer(hidden, rotations.get(rope), metadata)
            if index < len(added):
                hidden = hidden + added[index]
        all_kept = [kept[number] for number in self.kept_layers if number in kept]
        if self.norm is None:
            return torch.cat((hidden, *all_kept), dim=-1) if all_kept else hidden
        if all_kept:
            self.kept = torch.cat(all_kept, dim=-1)
        return hidden

    @property
    def received_layers(self) -> list[int]:
        """Layers of `kept_layers` on earlier pipeline stages."""
        return [number for number in self.kept_layers if number < self._numbers[0]]

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        assert self.embed_tokens is not None, "the first stage has the embedding"
        hidden: Tensor = self.embed_tokens(tokens)
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions)
        return hidden


class Decoder(LoadableModel):
    """Decoder model. Parameters are allocated, not filled. A decoder without a head returns hidden
    states and no logits."""

    def __init__(
        self,
        config: ModelConfig,
        spec: DecoderSpec,
        build: ModelBuild,
        *,
        has_head: bool = True,
        place_layer: PlaceLayer = leave_in_place,
    ) -> None:
        """`place_layer`: called for each new layer, whose parameters it may move, before the next
        layer is created."""
        super().__init__()
        stage = build.stage
        self.stage = stage
        self.config = config
        self.spec = spec
        self.dtype = build.dtype
        self.device = build.device
        self.group = build.group
        self.kv_cache_format: KVCacheFormat | None = None
        """Format of the KV caches; None: `dtype`."""
        self.weight_map = decoder_weight_map(config, spec, has_head=has_head)
        builder = self._builder = LayerBuilder(config, spec, build, self.weight_map)
        self.shape = builder.shape
        embed_tokens = builder.embedding(has_head=has_head)
        layers: dict[int, DecoderLayer] = {}
        for index, layer_spec in builder.stage_layers.items():
            layers[index] = builder.layer(f"model.layers.{index}", layer_spec)
            place_layer(index, layers[index])
        self.model = DecoderModel(
            embed_tokens,
            layers,
            builder.norm() if stage.is_last else None,
            builder.metadata_builder(),
            builder.rotary_embs(),
            [layer.rope for layer in builder.stage_layers.values()],
            builder.position_embedding() if spec.learned_positions and stage.is_first else None,
            config.hidden_size,
        )
        self.lm_head = builder.head(embed_tokens) if has_head and stage.is_last else None
        if not stage.is_last:
            # The last stage scrubs the blocks of requests with non-finite logits; other stages
            # do not learn of such requests, so they zero non-finite values.
            self.zero_non_finite()

    @property
    def layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        attentions = (layer.self_attn for layer in self.layers)
        return [
            attention
            for attention in attentions
            if not isinstance(attention, StateLayer | CrossAttention)
        ]

    @property
    def non_finite_guard(self) -> NonFiniteGuard | None:
        return self.model.guard

    def zero_non_finite(self) -> None:
        nan = nan_tensor(self.dtype, self.device)
        for attention in self.attention_layers:
            attention.zero_non_finite(nan)
        if self.stage.is_last and self.model.guard is None:
            self.model.guard = NonFiniteGuard(nan)

    @property
    def cross_attentions(self) -> list[CrossAttention]:
        attentions = (layer.self_attn for layer in self.layers)
        return [attention for attention in attentions if isinstance(attention, CrossAttention)]

    @property
    def state_layers(self) -> list[StateLayer]:
        attentions = (layer.self_attn for layer in self.layers)
        return [attention for attention in attentions if isinstance(attention, StateLayer)]

    def forward(self, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        return self.model(tokens, inputs)  # type: ignore[no-any-return]

    def part(self, first: int, end: int, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        """Run layers `first` to `end` - 1. Calling `part` for consecutive ranges of layers, each
        on the output of the previous part, equals a forward pass of tokens, except that no hidden
        states are kept."""
        return self.model.part(first, end, tokens, inputs)

    def embed(self, tokens: Tensor) -> Tensor:
        assert self.model.embed_tokens is not None, "the first stage has the embedding"
        return self.model.embed_tokens(tokens)  # type: ignore[no-any-return]

    @property
    def image_multiplier(self) -> float:
        """Embedding multiplier that also applies to image embeddings; 1 if it is rounded,
        because a rounded multiplier applies to token embeddings only."""
        spec = self.spec
        return 1.0 if spec.rounded_embedding_multiplier else spec.embedding_multiplier

    def keep_hidden_states(self, layers: tuple[int, ...]) -> None:
        self.model.kept_layers = layers

    @property
    def kept_hidden_states(self) -> Tensor | None:
        return self.model.kept

    @property
    def received_width(self) -> int:
        return (1 + len(self.model.received_layers)) * self.config.hidden_size

    def keep_embedding(self) -> None:
        if self.model.embed_tokens is None:
            self.model.embed_tokens = self._builder.token_embedding()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in the model's dtype; see CausalLM.logits."""
        assert self.lm_head is not None, "a decoder or a stage without a head gives no logits"
        return self.scale_logits(self.lm_head(hidden))

    def argmax(self, hidden: Tensor) -> Tensor | None:
        """Greedy tokens over a sharded vocabulary; see CausalLM.argmax. None on a single rank,
        which has all logits, and if the head is replaced."""
        # The FP8 compressor may replace the head module.
        if self.group.size == 1 or not isinstance(self.lm_head, ParallelLMHead):
            return None
        return self.lm_head.argmax(hidden, self.scale_logits)

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Apply the logits divisor and the soft cap."""
        divisor, cap = self.spec.logits_divisor, self.spec.logits_soft_cap
        if divisor != 1:
            logits = logits / divisor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def use_kv_cache_format(self, format: KVCacheFormat) -> None:
        self.kv_cache_format = format
        if format.has_layer_scales:
            self.weight_map = with_kv_scales(self.weight_map)
        for attention in self.attention_layers:
            attention.use_kv_cache_format(format)

    def cache_shapes(
        self, num_blocks: int, block_size: int, num_rings: int = 0
    ) -> list[tuple[Shape, ...]]:
        specs = (attention.kv_cache_spec for attention in self.attention_layers)
        return [
            spec.shapes(num_blocks, block_size, num_rings) for spec in specs if spec is not None
        ]

    def cache_windows(self) -> list[int | None]:
        specs = (attention.kv_cache_spec for attention in self.attention_layers)
        return [spec.window for spec in specs if spec is not None]

    def bind_caches(
        self, caches: list[tuple[Tensor, ...]], block_size: int, num_rings: int = 0
    ) -> None:
        for attention, own in zip(self.attention_layers, caches, strict=True):
            attention.bind_caches(*own, block_size=block_size, num_rings=num_rings)
        self.model.metadata.bind(block_size, num_rings)

    def state_specs(self) -> list[StateCacheSpec]:
        return [layer.state.spec for layer in self.state_layers]

    def bind_states(self, states: list[tuple[Tensor, ...]]) -> None:
        for layer, tensors in zip(self.state_layers, states, strict=True):
            layer.state.bind(tensors)

    def read_contiguously(self) -> None:
        self.model.metadata.contiguous = True
        self.zero_non_finite()

    def use_kernels(self, kernels: Kernels, *, split_qkv: bool = False) -> None:
        """Switch to the device's fused kernels. Called once, before the first launch."""
        self.model.metadata.attention_form = kernels.attention_form(
            self.dtype, has_score_options=self.spec.has_score_options
        )
        for rotary_emb in self.model.rotary_embs:
            rotary_emb.restore_sin_sign()
        for module in self.model.modules():
            if isinstance(module, RMSNorm):
                module.use_kernel(kernels.rms_norm)
        for layer in self.layers:
            if isinstance(layer.mlp, MoE):
                layer.mlp.experts.use_kernels(kernels)
        for attention in self.attention_layers:
            attention.use_kernels(kernels, split_qkv=split_qkv)
        # Matmuls of the kernels sum over all blocks of a launch, with weight zero for
        # blocks of other sequences.
        self.zero_non_finite()
