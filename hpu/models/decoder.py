"""Decoder shared by all plain model families; DecoderSpec describes the differences.

Embedding; layers of attention and an MLP or a mixture of experts (decoder_layer.py); norm; head.
Module paths are the paths of vLLM's Llama, so that calibration files made with vLLM can be used.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.decoder import decoder_weight_map
from config.checkpoint.weight_maps.kv_scales import with_kv_scales
from config.checkpoint.weight_maps.shard import Shard, shard_of
from config.errors import ConfigError
from config.model.decoder_spec import NORMS, DecoderSpec, LayerSpec, MoESpec, alibi_slopes
from config.model.model_config import ModelConfig
from config.model.moe import MoEConfig
from hpu.distributed.process_groups import shard_rank
from hpu.layers.attention import AttentionKind, HeadShape, SelfAttention
from hpu.layers.attention_base import AttentionLayer, Shape
from hpu.layers.block_indexer import BlockIndexer, IndexedAttention
from hpu.layers.cross_attention import CrossAttention
from hpu.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from hpu.layers.gated_delta import GatedDeltaNet
from hpu.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from hpu.layers.mamba2 import Mamba2Mixer
from hpu.layers.metadata import (
    AttentionInputs,
    AttentionMetadata,
    Visibility,
    distinct,
    rotated_positions,
)
from hpu.layers.metadata_builder import HybridMetadataBuilder, MetadataBuilder
from hpu.layers.mla import DirectQueries, LatentQueries, MLAAttention
from hpu.layers.mlp import MLP, GatedMLP
from hpu.layers.moe import SWIGLU_OAI, Experts, ExpertsSpec, MoE, SparseMixer, TopKRouter
from hpu.layers.non_finite import NonFiniteGuard, nan_tensor
from hpu.layers.norm import FullQKNorm, LayerNorm, QKNorm, RMSNorm, UnweightedQKNorm
from hpu.layers.short_conv import ShortConv
from hpu.layers.state_cache import StateCacheSpec
from hpu.models.base import LoadableModel, ModelBuild
from hpu.models.decoder_layer import LAYERS, CrossAttentionLayer, DecoderLayer, StateLayer
from hpu.ops.kernels import Kernels
from hpu.ops.rope import RotaryEmbedding, Rotation
from hpu.quantization.base import (
    ExpertsShards,
    LinearMethod,
    LinearShards,
    MoEMethod,
)
from hpu.quantization.kv_cache import KVCacheFormat
from hpu.quantization.unquantized import UNQUANTIZED, UNQUANTIZED_MOE

PlaceLayer = Callable[[int, DecoderLayer], None]


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
        """Rotary embeddings in use."""
        both = (self.rotary_emb, self.local_rotary_emb)
        return [rotary for rotary in both if rotary is not None]

    def forward(self, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        """(B, Q) tokens, or (B, Q, hidden) embeddings or hidden states, to (B, Q, hidden). For
        wider embeddings (B, Q, n * hidden), the first layer reads the first `hidden` numbers;
        each following part is added to the output of the next layer (Meng et al., DeepStack,
        2024). With `kept_layers`, a pipeline stage appends to its output the hidden states
        before all `kept_layers` up to its last layer."""
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
        """Apply the final norm and the non-finite guard."""
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
        """Rotations by rope name."""
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
    """Decoder model. Parameters are allocated, not filled: hpu/model_loader/loader.py fills them. A
    decoder without a head returns hidden states and no logits."""

    def __init__(
        self,
        config: ModelConfig,
        spec: DecoderSpec,
        build: ModelBuild,
        *,
        has_head: bool = True,
        place_layer: PlaceLayer | None = None,
    ) -> None:
        """`place_layer`: called with the index and the empty parameters of each layer before the
        next layer is created; may move the parameters."""
        super().__init__()
        stage, group, length = build.stage, build.group, build.length(config)
        own = {i: spec.layers[i] for i in stage.layers(len(spec.layers))}
        self.stage = stage
        self._stage_layers = own
        self.config = config
        self.spec = spec
        self.dtype = build.dtype
        self.device = build.device
        self.kv_cache_format: KVCacheFormat | None = None
        """Format of the KV caches; None: `dtype`."""
        self.weight_map = decoder_weight_map(config, spec, has_head=has_head)
        self.shape = HeadShape(
            config.num_heads // group.size,
            config.kv_heads_per_rank(group.size),
            config.head_dim,
            spec.attention_scale or config.head_dim**-0.5,
        )
        self.group = group
        self._expert_group = build.expert_group
        self._quantization = build.quantization
        self._place_layer = place_layer
        self._shards = {} if build.quantization is None else self._shards_by_parameter()
        self._kinds = distinct(
            Visibility(layer.window, layer.chunk)
            for layer in own.values()
            if spec.state_of(layer) is None and layer.attention != "cross"
        )
        self.model = DecoderModel(
            self._embedding(has_head=has_head),
            {i: self._placed_layer(i, layer) for i, layer in own.items()},
            self._norm() if stage.is_last else None,
            self._metadata_builder(),
            self._rotary_embs(length),
            [layer.rope for layer in own.values()],
            self._embed_positions(length) if spec.learned_positions and stage.is_first else None,
            config.hidden_size,
        )
        self.lm_head = self._head() if has_head and stage.is_last else None
        if not stage.is_last:
            # The last stage scrubs the blocks of requests with non-finite logits; other stages
            # do not learn of such requests, so they zero non-finite values.
            self.zero_non_finite()

    def _shards_by_parameter(self) -> dict[str, list[Shard]]:
        """Shards of this rank by parameter."""
        shards: dict[str, list[Shard]] = {}
        at = shard_rank(self.group, self._expert_group)
        for spec in self.weight_map.entries():
            shard = shard_of(spec, at)
            if shard is not None:
                shards.setdefault(spec.parameter, []).append(shard)
        return shards

    def _embedding(self, *, has_head: bool) -> VocabParallelEmbedding | None:
        """Token embedding: on the first stage, and on the last stage if a head is tied to it."""
        is_tied = has_head and self.config.tie_word_embeddings
        if not self.stage.is_first and not (self.stage.is_last and is_tied):
            return None
        return self._new_embedding()

    def _new_embedding(self) -> VocabParallelEmbedding:
        config = self.config
        return VocabParallelEmbedding(
            config.vocab_size + self.spec.num_further_embeddings,
            config.hidden_size,
            multiplier=self._embedding_multiplier(),
            dtype=self.dtype,
            device=self.device,
            group=self.group,
        )

    def _embedding_multiplier(self) -> float:
        multiplier = self.spec.embedding_multiplier
        if self.spec.rounded_embedding_multiplier:
            return float(torch.tensor(multiplier, dtype=self.dtype))
        return multiplier

    def _rotary_embs(self, length: int) -> dict[str, RotaryEmbedding]:
        config = self.config
        used = {layer.rope for layer in self._stage_layers.values()}
        ropes = {"default": config.rope, "local": config.local_rope}
        return {
            name: RotaryEmbedding(config, rope, length=length, dtype=self.dtype, device=self.device)
            for name, rope in ropes.items()
            if rope is not None and name in used
        }

    def _embed_positions(self, length: int) -> VocabParallelEmbedding:
        config = self.config
        if length > config.max_position:
            raise ConfigError(
                f"{config.path} has {config.max_position} learned positions, --max-model-len is "
                f"{length}: set it to at most {config.max_position}"
            )
        return VocabParallelEmbedding(
            config.max_position, config.hidden_size, dtype=self.dtype, device=self.device
        )

    def _alibi_slopes(self) -> Tensor | None:
        """(heads) ALiBi slopes of this rank's heads; None: no ALiBi."""
        if self.spec.alibi_max_bias is None:
            return None
        slopes = alibi_slopes(self.config.num_heads, self.spec.alibi_max_bias)
        first = self.group.rank * self.shape.num_heads
        mine = slopes[first : first + self.shape.num_heads]
        scaled = [slope * self.spec.alibi_scale for slope in mine]
        return torch.tensor(scaled, dtype=torch.float32, device=self.device)

    def _head(self) -> ParallelLMHead:
        config = self.config
        path = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        head = ParallelLMHead(
            config.hidden_size,
            config.vocab_size,
            bias=self.spec.head_bias,
            **self._options(path, config.hidden_size, is_head=True),
        )
        if config.tie_word_embeddings:
            assert self.model.embed_tokens is not None, "a tied head has the embedding's weights"
            head.weight = self.model.embed_tokens.weight
        return head

    @property
    def _norm_options(self) -> dict[str, Any]:
        dtype = torch.float32 if self.spec.norm_offset else self.dtype
        return {"dtype": dtype, "device": self.device}

    def _norm(self) -> RMSNorm | LayerNorm:
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        if self.spec.norm == "layer":
            return LayerNorm(size, eps, bias=self.spec.norm_bias, **self._norm_options)
        return RMSNorm(size, eps, **self._norm_options)

    def _metadata_builder(self) -> MetadataBuilder:
        arguments: dict[str, Any] = {
            "causal": self.config.is_causal,
            "alibi_slopes": self._alibi_slopes(),
            "temperature": self.spec.temperature,
        }
        size = self._embeddings_per_tile
        indexer = self.spec.indexer
        if not (self.spec.states or size or indexer):
            return MetadataBuilder(self._kinds, **arguments)
        return HybridMetadataBuilder(
            self._kinds,
            has_states=bool(self.spec.states),
            embeddings_per_tile=size,
            indexer=indexer,
            **arguments,
        )

    def _placed_layer(self, index: int, spec: LayerSpec) -> DecoderLayer:
        layer = self._layer(f"model.layers.{index}", spec)
        if self._place_layer is not None:
            self._place_layer(index, layer)
        return layer

    def _layer(self, path: str, layer: LayerSpec) -> DecoderLayer:
        kinds: dict[str, Callable[[str, LayerSpec], Any]] = {
            "cross": self._cross_attention,
            "dense": self._dense_attention,
            "mla": self._latent_attention,
            "mamba2": self._mamba2,
            "gated_delta": self._gated_delta,
            "short_conv": self._short_conv,
        }
        attention = kinds[layer.attention]
        make_mlp: Callable[[str], GatedMLP | MLP | MoE] = self._dense_mlp
        mlp_name = self.spec.mlp
        if self.spec.moe is not None and layer.feed_forward == "moe":
            make_mlp, mlp_name = self._moe, self.spec.moe.block
        make = CrossAttentionLayer if layer.attention == "cross" else LAYERS[self.spec.arrangement]
        return make(
            attention(f"{path}.self_attn", layer),
            make_mlp(f"{path}.{mlp_name}"),
            {name: self._norm() for name in NORMS[self.spec.arrangement]},
            multiplier=self.spec.residual_multiplier,
            mlp_name=mlp_name,
        )

    def _dense_attention(self, path: str, layer: LayerSpec) -> SelfAttention:
        config, spec, shape = self.config, self.spec, self.shape
        visibility = Visibility(layer.window, layer.chunk)
        make = IndexedAttention if layer.indexed else SelfAttention
        attention = make(
            shape,
            qkv_proj=QKVParallelLinear(
                config.hidden_size,
                QKVParallelLinear.sizes(
                    config.num_heads * (2 if spec.attention_gate else 1),
                    config.num_kv_heads,
                    config.head_dim,
                    self.group.size,
                ),
                bias=spec.qkv_bias,
                **self._options(f"{path}.qkv_proj", config.hidden_size),
            ),
            o_proj=RowParallelLinear(
                config.num_heads * config.head_dim,
                config.hidden_size,
                bias=spec.o_bias,
                **self._options(f"{path}.o_proj", shape.query_size),
            ),
            qk_norm=self._qk_norm() if layer.qk_norm else None,
            kind=AttentionKind(
                visibility=visibility,
                index=self._kinds.index(visibility),
                soft_cap=spec.attention_soft_cap,
                has_sinks=layer.sinks,
                norm_after_rotation=spec.qk_norm_after_rope,
                clip=config.clip_qkv,
                tunes_temperature=layer.tunes_temperature,
                index_dim=spec.indexer.head_dim if spec.indexer and layer.indexed else 0,
                has_gate=spec.attention_gate,
            ),
        )
        if isinstance(attention, IndexedAttention):
            attention.indexer = self._block_indexer(path, visibility)
        return attention

    def _block_indexer(self, path: str, visibility: Visibility) -> BlockIndexer:
        hidden, eps, spec = self.config.hidden_size, self.config.rms_norm_eps, self.spec.indexer
        assert spec, "a layer with an indexer has a spec of it"
        size, path = spec.head_dim, f"{path}.indexer"
        # Like KV heads, index heads are replicated if there are fewer heads than ranks.
        query_size = max(spec.num_heads, self.group.size) * size
        return BlockIndexer(
            spec,
            q_proj=ColumnParallelLinear(
                hidden, query_size, **self._options(f"{path}.q_proj", hidden)
            ),
            k_proj=ReplicatedLinear(hidden, size, **self._options(f"{path}.k_proj", hidden)),
            q_norm=RMSNorm(size, eps, **self._norm_options),
            k_norm=RMSNorm(size, eps, **self._norm_options),
            index=self._kinds.index(visibility),
        )

    def _cross_attention(self, path: str, layer: LayerSpec) -> CrossAttention:
        config, shape = self.config, self.shape
        # See QKVParallelLinear.sizes.
        kv_size = max(config.num_kv_heads, self.group.size) * config.head_dim
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        hidden, query_size = config.hidden_size, config.num_heads * config.head_dim
        return CrossAttention(
            shape,
            q_proj=ColumnParallelLinear(
                hidden, query_size, **self._options(f"{path}.q_proj", hidden)
            ),
            kv_proj=MergedColumnParallelLinear(
                hidden, [kv_size, kv_size], **self._options(f"{path}.kv_proj", hidden)
            ),
            o_proj=RowParallelLinear(
                query_size, hidden, **self._options(f"{path}.o_proj", shape.query_size)
            ),
            q_norm=RMSNorm(config.head_dim, config.rms_norm_eps, **options),
            k_norm=RMSNorm(config.head_dim, config.rms_norm_eps, **options),
        )

    @property
    def _embeddings_per_tile(self) -> int:
        """Image embeddings per tile for cross attention; 0: no cross attention."""
        vision = self.config.vision
        return 0 if vision is None or vision.cross is None else vision.cross.embeddings_per_tile

    def _latent_attention(self, path: str, layer: LayerSpec) -> MLAAttention:
        config, spec, mla = self.config, self.spec, self.spec.mla
        assert mla is not None and layer.window is None
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        hidden, rank, eps = config.hidden_size, mla.q_lora_rank, mla.norm_eps
        query_size = config.num_heads * mla.qk_head_dim
        queries: LatentQueries | DirectQueries
        if rank is None:
            queries = DirectQueries(
                q_proj=ColumnParallelLinear(
                    hidden, query_size, **self._options(f"{path}.q_proj", hidden)
                ),
                kv_a_proj_with_mqa=ReplicatedLinear(
                    hidden,
                    mla.latent_size,
                    bias=spec.qkv_bias,
                    **self._options(f"{path}.kv_a_proj_with_mqa", hidden),
                ),
            )
        else:
            queries = LatentQueries(
                fused_qkv_a_proj=ReplicatedLinear(
                    hidden,
                    [rank, mla.latent_size],
                    bias=spec.qkv_bias,
                    **self._options(f"{path}.fused_qkv_a_proj", hidden),
                ),
                q_a_layernorm=RMSNorm(rank, eps, **options),
                q_b_proj=ColumnParallelLinear(
                    rank, query_size, **self._options(f"{path}.q_b_proj", rank)
                ),
            )
        return MLAAttention(
            mla,
            self.shape.num_heads,
            self.shape.scale,
            queries,
            kv_a_layernorm=RMSNorm(mla.kv_lora_rank, eps, **options),
            # Not quantized: `process_weights` makes the absorbed matrices from it.
            kv_b_proj=ColumnParallelLinear(
                mla.kv_lora_rank,
                config.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim),
                group=self.group,
                **options,
            ),
            o_proj=RowParallelLinear(
                config.num_heads * mla.v_head_dim,
                hidden,
                bias=spec.o_bias,
                **self._options(f"{path}.o_proj", self.shape.num_heads * mla.v_head_dim),
            ),
        )

    def _mamba2(self, path: str, layer: LayerSpec) -> Mamba2Mixer:
        state = self.spec.mamba2
        assert state is not None
        num_ranks, inner = self.group.size, state.inner_size
        # Groups are replicated if there are fewer groups than ranks.
        groups = max(state.num_groups, num_ranks) * state.state_size
        in_proj, out_proj = self._state_projections(
            path, [inner, inner, groups, groups, state.num_heads], inner, bias=state.proj_bias
        )
        return Mamba2Mixer(
            state.on_rank(num_ranks),
            in_proj=in_proj,
            out_proj=out_proj,
            eps=self.config.rms_norm_eps,
            group=self.group,
            ranks_per_group=max(1, num_ranks // state.num_groups),
        )

    def _gated_delta(self, path: str, layer: LayerSpec) -> GatedDeltaNet:
        state = self.spec.gated_delta
        assert state is not None
        heads = state.num_value_heads
        # Key heads are replicated like the groups of Mamba2Mixer.
        key_size = max(state.num_key_heads, self.group.size) * state.key_dim
        sizes = [key_size, key_size, state.value_size, state.value_size, heads, heads]
        in_proj, out_proj = self._state_projections(path, sizes, state.value_size, bias=False)
        eps = self.config.rms_norm_eps
        own = state.on_rank(self.group.size)
        return GatedDeltaNet(own, in_proj=in_proj, out_proj=out_proj, eps=eps)

    def _short_conv(self, path: str, layer: LayerSpec) -> ShortConv:
        state = self.spec.short_conv
        assert state is not None
        size = state.conv_size
        in_proj, out_proj = self._state_projections(path, [size] * 3, size, bias=state.bias)
        return ShortConv(state.on_rank(self.group.size), in_proj=in_proj, out_proj=out_proj)

    def _state_projections(
        self, path: str, sizes: list[int], inner: int, *, bias: bool
    ) -> tuple[MergedColumnParallelLinear, RowParallelLinear]:
        """Input projection of a StateLayer, with the outputs `sizes`, and output projection of
        its `inner` features."""
        hidden = self.config.hidden_size
        return (
            MergedColumnParallelLinear(
                hidden, sizes, bias=bias, **self._options(f"{path}.in_proj", hidden)
            ),
            RowParallelLinear(
                inner,
                hidden,
                bias=bias,
                **self._options(f"{path}.out_proj", inner // self.group.size),
            ),
        )

    def _qk_norm(self) -> QKNorm | FullQKNorm | UnweightedQKNorm | None:
        shape, eps = self.shape, self.config.rms_norm_eps
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        kind, options = self.spec.qk_norm, self._norm_options
        if kind == "none":
            return None
        if kind == "all":
            return FullQKNorm(heads, kv_heads, shape.head_dim, eps, group=self.group, **options)
        if kind == "unweighted":
            return UnweightedQKNorm(eps)
        centered = self.spec.norm == "layer"
        return QKNorm(heads + kv_heads, shape.head_dim, eps, centered=centered, **options)

    def _dense_mlp(self, path: str) -> GatedMLP | MLP:
        return self._mlp(path, self.spec.mlp_size or self.config.intermediate_size)

    def _moe(self, path: str) -> MoE:
        config, moe, spec = self.config, self.config.moe, self.spec.moe
        assert moe is not None and spec is not None
        hidden = config.hidden_size
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        gate_dtype = torch.float32 if spec.float32_router else self.dtype
        distributes_experts = self._expert_group.size > 1
        shared = shared_gate = None
        if moe.shared_size:
            shared = self._gated_mlp(f"{path}.shared_experts", moe.shared_size)
            shared_gate = ReplicatedLinear(hidden, 1, **options) if spec.shared_gate else None
        return MoE(
            ReplicatedLinear(
                hidden,
                moe.num_experts,
                bias=spec.router_bias,
                dtype=gate_dtype,
                device=self.device,
            ),
            _router(moe, spec),
            Experts(
                ExpertsSpec(
                    moe.num_experts,
                    hidden,
                    moe.inner_size,
                    spec.clamped_swiglu or config.hidden_act,
                    has_bias=spec.expert_bias,
                ),
                method=self._moe_method(f"{path}.experts"),
                group=self._expert_group if distributes_experts else self.group,
                is_distributed=distributes_experts,
                **options,
            ),
            shared,
            shared_gate,
            has_correction_bias=bool(spec.correction_bias),
            scales_input=spec.scales_input,
        )

    def _moe_method(self, path: str) -> MoEMethod:
        """Method for the experts at `path`."""
        config, moe, spec = self.config, self.config.moe, self.spec.moe
        assert moe is not None and spec is not None
        if self._quantization is None:
            return UNQUANTIZED_MOE
        ranks = 1 if self._expert_group.size > 1 else self.group.size
        experts = ExpertsShards(
            self._shards[f"{path}.w13_weight"],
            self._shards[f"{path}.w2_weight"],
            config.hidden_size,
            moe.inner_size // ranks,
            config.hidden_act if spec.clamped_swiglu is None else SWIGLU_OAI,
        )
        method = self._quantization.moe_method(experts)
        if method is None:
            raise ConfigError(
                f"{config.path} is a mixture of experts, for which quantization is not supported: "
                "leave quantization out"
            )
        return method

    def _mlp(self, path: str, inner: int) -> GatedMLP | MLP:
        if self.spec.gated_mlp:
            return self._gated_mlp(path, inner)
        hidden, has_bias = self.config.hidden_size, self.spec.mlp_bias
        up = ColumnParallelLinear(
            hidden, inner, bias=has_bias, **self._options(f"{path}.up_proj", hidden)
        )
        return MLP(up, self._down_proj(path, inner), self.config.hidden_act)

    def _gated_mlp(self, path: str, inner: int) -> GatedMLP:
        hidden = self.config.hidden_size
        gate_up = MergedColumnParallelLinear(
            hidden,
            [inner, inner],
            bias=self.spec.mlp_bias,
            **self._options(f"{path}.gate_up_proj", hidden),
        )
        activation = self.spec.mlp_swiglu or self.config.hidden_act
        return GatedMLP(gate_up, self._down_proj(path, inner), activation)

    def _down_proj(self, path: str, inner: int) -> RowParallelLinear:
        return RowParallelLinear(
            inner,
            self.config.hidden_size,
            bias=self.spec.mlp_bias,
            **self._options(f"{path}.down_proj", inner // self.group.size),
        )

    def _options(self, path: str, in_features: int, *, is_head: bool = False) -> dict[str, Any]:
        """Constructor options of the linear layer at `path`, which has `in_features` inputs on
        this rank."""
        method: LinearMethod = UNQUANTIZED
        if self._quantization is not None:
            weight = LinearShards(self._shards[f"{path}.weight"], in_features, is_head=is_head)
            method = self._quantization.linear_method(weight)
        return {
            "dtype": self.dtype,
            "device": self.device,
            "method": method,
            "group": self.group,
        }

    @property
    def layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """Attention layers with keys and values."""
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
        """Layers with a state."""
        attentions = (layer.self_attn for layer in self.layers)
        return [attention for attention in attentions if isinstance(attention, StateLayer)]

    def forward(self, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        return self.model(tokens, inputs)  # type: ignore[no-any-return]

    def part(self, first: int, end: int, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        """Run layers `first` to `end` - 1. Calling `part` for consecutive ranges of layers, each
        on the output of the previous part, equals a forward pass."""
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
            self.model.embed_tokens = self._new_embedding()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in the model's dtype; see CausalLM.logits."""
        assert self.lm_head is not None, "a decoder or a stage without a head gives no logits"
        return self.scale_logits(self.lm_head(hidden))

    def argmax(self, hidden: Tensor) -> Tensor | None:
        """Greedy tokens over a sharded vocabulary; see CausalLM.argmax. None on a single rank,
        which has all logits."""
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


def _router(moe: MoEConfig, spec: MoESpec) -> TopKRouter | SparseMixer:
    if spec.sparse_mixer is not None:
        return SparseMixer(spec.sparse_mixer)
    return TopKRouter(
        moe.top_k,
        moe.renormalize,
        scoring=spec.scoring,
        num_groups=1 if spec.group_scoring == "none" else moe.num_groups,
        top_groups=moe.top_groups,
        group_scoring="max" if spec.group_scoring == "max" else "top2",
        scaling_factor=moe.scaling_factor,
    )
