"""LayerBuilder: builds the layers of a decoder from its spec."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from config.checkpoint.weight_maps.base import WeightMap
from config.errors import ConfigError
from config.model.decoder_spec import NORMS, DecoderSpec, LayerSpec, MoESpec, alibi_slopes
from config.model.model_config import ModelConfig
from config.model.moe import MoEConfig
from config.model.state_space import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from hpu.layers.attention import AttentionKind, HeadShape, SelfAttention
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
    Visibility,
    distinct,
)
from hpu.layers.metadata_builder import HybridMetadataBuilder, MetadataBuilder
from hpu.layers.mla import DirectQueries, LatentQueries, MLAAttention
from hpu.layers.mlp import MLP, GatedMLP
from hpu.layers.moe import SWIGLU_OAI, Experts, ExpertsSpec, MoE, SparseMixer, TopKRouter
from hpu.layers.norm import FullQKNorm, LayerNorm, QKNorm, RMSNorm, UnweightedQKNorm
from hpu.layers.short_conv import ShortConv
from hpu.models.base import ModelBuild
from hpu.models.decoder_layer import LAYERS, CrossAttentionLayer, DecoderLayer
from hpu.models.layer_methods import layer_methods
from hpu.ops.rope import RotaryEmbedding


class LayerBuilder:
    """Builds the modules of a decoder for this rank. Parameters are allocated, not filled."""

    def __init__(
        self, config: ModelConfig, spec: DecoderSpec, build: ModelBuild, weight_map: WeightMap
    ) -> None:
        group = build.group
        self._config = config
        self._spec = spec
        self._dtype, self._device = build.dtype, build.device
        self._length = build.length(config)
        self._group, self._expert_group = group, build.expert_group
        self._stage = build.stage
        self._methods = layer_methods(config, build, weight_map)
        self.stage_layers = {i: spec.layers[i] for i in build.stage.layers(len(spec.layers))}
        """Specs of the layers on this pipeline stage, by layer number in the whole model."""
        self.shape = HeadShape(
            config.num_heads // group.size,
            config.kv_heads_per_rank(group.size),
            config.head_dim,
            spec.attention_scale or config.head_dim**-0.5,
        )
        self._kinds = distinct(
            Visibility(layer.window, layer.chunk)
            for layer in self.stage_layers.values()
            if spec.state_of(layer) is None and layer.attention != "cross"
        )

    def embedding(self, *, has_head: bool) -> VocabParallelEmbedding | None:
        """Token embedding: on the first stage, and on the last stage if a head is tied to it."""
        is_tied = has_head and self._config.tie_word_embeddings
        if not self._stage.is_first and not (self._stage.is_last and is_tied):
            return None
        return self.token_embedding()

    def token_embedding(self) -> VocabParallelEmbedding:
        config = self._config
        return VocabParallelEmbedding(
            config.vocab_size + self._spec.num_further_embeddings,
            config.hidden_size,
            multiplier=self._embedding_multiplier(),
            dtype=self._dtype,
            device=self._device,
            group=self._group,
        )

    def _embedding_multiplier(self) -> float:
        multiplier = self._spec.embedding_multiplier
        if self._spec.rounded_embedding_multiplier:
            return float(torch.tensor(multiplier, dtype=self._dtype))
        return multiplier

    def rotary_embs(self) -> dict[str, RotaryEmbedding]:
        config = self._config
        used = {layer.rope for layer in self.stage_layers.values()}
        ropes = {"default": config.rope, "local": config.local_rope}
        return {
            name: RotaryEmbedding(
                config, rope, length=self._length, dtype=self._dtype, device=self._device
            )
            for name, rope in ropes.items()
            if rope is not None and name in used
        }

    def position_embedding(self) -> VocabParallelEmbedding:
        config = self._config
        if self._length > config.max_position:
            raise ConfigError(
                f"{config.path} has {config.max_position} learned positions, --max-model-len is "
                f"{self._length}: set it to at most {config.max_position}"
            )
        return VocabParallelEmbedding(
            config.max_position, config.hidden_size, dtype=self._dtype, device=self._device
        )

    def _alibi_slopes(self) -> Tensor | None:
        """(heads) ALiBi slopes of this rank's heads; None: no ALiBi."""
        if self._spec.alibi_max_bias is None:
            return None
        slopes = alibi_slopes(self._config.num_heads, self._spec.alibi_max_bias)
        first = self._group.rank * self.shape.num_heads
        mine = slopes[first : first + self.shape.num_heads]
        scaled = [slope * self._spec.alibi_scale for slope in mine]
        return torch.tensor(scaled, dtype=torch.float32, device=self._device)

    def head(self, embed_tokens: VocabParallelEmbedding | None) -> ParallelLMHead:
        """Output head, which shares the weights of `embed_tokens` if the checkpoint ties them."""
        config = self._config
        path = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        head = ParallelLMHead(
            config.hidden_size,
            config.vocab_size,
            bias=self._spec.head_bias,
            **self._options(path, config.hidden_size, is_head=True),
        )
        if config.tie_word_embeddings:
            assert embed_tokens is not None, "a tied head has the embedding's weights"
            head.weight = embed_tokens.weight
        return head

    @property
    def _norm_options(self) -> dict[str, Any]:
        dtype = torch.float32 if self._spec.norm_offset else self._dtype
        return {"dtype": dtype, "device": self._device}

    def norm(self) -> RMSNorm | LayerNorm:
        size, eps = self._config.hidden_size, self._config.rms_norm_eps
        if self._spec.norm == "layer":
            return LayerNorm(size, eps, bias=self._spec.norm_bias, **self._norm_options)
        return RMSNorm(size, eps, **self._norm_options)

    def metadata_builder(self) -> MetadataBuilder:
        arguments: dict[str, Any] = {
            "causal": self._config.is_causal,
            "alibi_slopes": self._alibi_slopes(),
            "temperature": self._spec.temperature,
        }
        size = self._embeddings_per_tile
        indexer = self._spec.indexer
        if not (self._spec.states or size or indexer):
            return MetadataBuilder(self._kinds, **arguments)
        return HybridMetadataBuilder(
            self._kinds,
            has_states=bool(self._spec.states),
            embeddings_per_tile=size,
            indexer=indexer,
            **arguments,
        )

    def layer(self, path: str, layer: LayerSpec) -> DecoderLayer:
        """The layer at `path`."""
        kinds: dict[str, Callable[[str, LayerSpec], Any]] = {
            "cross": self._cross_attention,
            "dense": self._dense_attention,
            "mla": self._latent_attention,
        }
        attention = kinds.get(layer.attention, self._state_layer)
        make_mlp: Callable[[str], GatedMLP | MLP | MoE] = self._dense_mlp
        mlp_name, moe = self._spec.mlp, self._spec.moe
        if moe is not None and layer.feed_forward == "moe":
            make_mlp, mlp_name = partial(self._moe, moe), moe.block
        make = CrossAttentionLayer if layer.attention == "cross" else LAYERS[self._spec.arrangement]
        return make(
            attention(f"{path}.self_attn", layer),
            make_mlp(f"{path}.{mlp_name}"),
            {name: self.norm() for name in NORMS[self._spec.arrangement]},
            multiplier=self._spec.residual_multiplier,
            mlp_name=mlp_name,
        )

    def _dense_attention(self, path: str, layer: LayerSpec) -> SelfAttention:
        config, spec, shape = self._config, self._spec, self.shape
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
                    self._group.size,
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
        hidden, eps, spec = self._config.hidden_size, self._config.rms_norm_eps, self._spec.indexer
        assert spec, "a layer with an indexer has a spec of it"
        size, path = spec.head_dim, f"{path}.indexer"
        # Like KV heads, index heads are replicated if there are fewer heads than ranks.
        query_size = max(spec.num_heads, self._group.size) * size
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
        config, shape = self._config, self.shape
        # See QKVParallelLinear.sizes.
        kv_size = max(config.num_kv_heads, self._group.size) * config.head_dim
        options: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
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
        cross = self._config.cross_attention
        return 0 if cross is None else cross.embeddings_per_tile

    def _latent_attention(self, path: str, layer: LayerSpec) -> MLAAttention:
        config, spec, mla = self._config, self._spec, self._spec.mla
        assert mla is not None and layer.window is None
        options: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
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
                group=self._group,
                **options,
            ),
            o_proj=RowParallelLinear(
                config.num_heads * mla.v_head_dim,
                hidden,
                bias=spec.o_bias,
                **self._options(f"{path}.o_proj", self.shape.num_heads * mla.v_head_dim),
            ),
        )

    def _state_layer(self, path: str, layer: LayerSpec) -> Mamba2Mixer | GatedDeltaNet | ShortConv:
        state = self._spec.state_of(layer)
        if isinstance(state, Mamba2Spec):
            return self._mamba2(path, state)
        if isinstance(state, GatedDeltaSpec):
            return self._gated_delta(path, state)
        assert isinstance(state, ShortConvSpec)
        return self._short_conv(path, state)

    def _mamba2(self, path: str, state: Mamba2Spec) -> Mamba2Mixer:
        num_ranks, inner = self._group.size, state.inner_size
        # Groups are replicated if there are fewer groups than ranks.
        groups = max(state.num_groups, num_ranks) * state.state_size
        in_proj, out_proj = self._state_projections(
            path, [inner, inner, groups, groups, state.num_heads], inner, bias=state.proj_bias
        )
        return Mamba2Mixer(
            state.on_rank(num_ranks),
            in_proj=in_proj,
            out_proj=out_proj,
            eps=self._config.rms_norm_eps,
            group=self._group,
            ranks_per_group=max(1, num_ranks // state.num_groups),
        )

    def _gated_delta(self, path: str, state: GatedDeltaSpec) -> GatedDeltaNet:
        heads = state.num_value_heads
        # Key heads are replicated like the groups of Mamba2Mixer.
        key_size = max(state.num_key_heads, self._group.size) * state.key_dim
        sizes = [key_size, key_size, state.value_size, state.value_size, heads, heads]
        in_proj, out_proj = self._state_projections(path, sizes, state.value_size, bias=False)
        eps = self._config.rms_norm_eps
        own = state.on_rank(self._group.size)
        return GatedDeltaNet(own, in_proj=in_proj, out_proj=out_proj, eps=eps)

    def _short_conv(self, path: str, state: ShortConvSpec) -> ShortConv:
        size = state.conv_size
        in_proj, out_proj = self._state_projections(path, [size] * 3, size, bias=state.bias)
        return ShortConv(state.on_rank(self._group.size), in_proj=in_proj, out_proj=out_proj)

    def _state_projections(
        self, path: str, sizes: list[int], inner: int, *, bias: bool
    ) -> tuple[MergedColumnParallelLinear, RowParallelLinear]:
        """Input projection of a StateLayer, with the outputs `sizes`, and output projection of
        its `inner` features."""
        hidden = self._config.hidden_size
        return (
            MergedColumnParallelLinear(
                hidden, sizes, bias=bias, **self._options(f"{path}.in_proj", hidden)
            ),
            RowParallelLinear(
                inner,
                hidden,
                bias=bias,
                **self._options(f"{path}.out_proj", inner // self._group.size),
            ),
        )

    def _qk_norm(self) -> QKNorm | FullQKNorm | UnweightedQKNorm | None:
        shape, eps = self.shape, self._config.rms_norm_eps
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        kind, options = self._spec.qk_norm, self._norm_options
        if kind == "none":
            return None
        if kind == "all":
            return FullQKNorm(heads, kv_heads, shape.head_dim, eps, group=self._group, **options)
        if kind == "unweighted":
            return UnweightedQKNorm(eps)
        centered = self._spec.norm == "layer"
        return QKNorm(heads + kv_heads, shape.head_dim, eps, centered=centered, **options)

    def _dense_mlp(self, path: str) -> GatedMLP | MLP:
        return self._mlp(path, self._spec.mlp_size or self._config.intermediate_size)

    def _moe(self, spec: MoESpec, path: str) -> MoE:
        config, moe = self._config, self._config.moe
        assert moe is not None
        hidden = config.hidden_size
        options: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
        gate_dtype = torch.float32 if spec.float32_router else self._dtype
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
                device=self._device,
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
                method=self._methods.experts(
                    f"{path}.experts",
                    moe.inner_size // (1 if distributes_experts else self._group.size),
                    SWIGLU_OAI if spec.clamped_swiglu else config.hidden_act,
                ),
                group=self._expert_group if distributes_experts else self._group,
                is_distributed=distributes_experts,
                **options,
            ),
            shared,
            shared_gate,
            has_correction_bias=bool(spec.correction_bias),
            scales_input=spec.scales_input,
        )

    def _mlp(self, path: str, inner: int) -> GatedMLP | MLP:
        if self._spec.gated_mlp:
            return self._gated_mlp(path, inner)
        hidden, has_bias = self._config.hidden_size, self._spec.mlp_bias
        up = ColumnParallelLinear(
            hidden, inner, bias=has_bias, **self._options(f"{path}.up_proj", hidden)
        )
        return MLP(up, self._down_proj(path, inner), self._config.hidden_act)

    def _gated_mlp(self, path: str, inner: int) -> GatedMLP:
        hidden = self._config.hidden_size
        gate_up = MergedColumnParallelLinear(
            hidden,
            [inner, inner],
            bias=self._spec.mlp_bias,
            **self._options(f"{path}.gate_up_proj", hidden),
        )
        activation = self._spec.mlp_swiglu or self._config.hidden_act
        return GatedMLP(gate_up, self._down_proj(path, inner), activation)

    def _down_proj(self, path: str, inner: int) -> RowParallelLinear:
        return RowParallelLinear(
            inner,
            self._config.hidden_size,
            bias=self._spec.mlp_bias,
            **self._options(f"{path}.down_proj", inner // self._group.size),
        )

    def _options(self, path: str, in_features: int, *, is_head: bool = False) -> dict[str, Any]:
        """Constructor options of the linear layer at `path`, which has `in_features` inputs on
        this rank."""
        return {
            "dtype": self._dtype,
            "device": self._device,
            "method": self._methods.linear(path, in_features, is_head=is_head),
            "group": self._group,
        }


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
