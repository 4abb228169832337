"""The decoder that all plain families share; DecoderSpec says where they differ.

Embedding; per layer x = x + m * attention(norm(x)) and x = x + m * mlp(norm(x)), where the MLP may
be a mixture of experts; norm; head. Module paths are those of vLLM's models, so that its users'
calibration files fit.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.decoder import decoder_weight_map
from config.errors import ConfigError
from config.model.decoder_spec import DecoderSpec, LayerSpec, MoESpec, alibi_slopes
from config.model.model_config import ModelConfig
from config.model.moe import MoEConfig
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.layers.attention import AttentionKind, HeadShape, SelfAttention
from hpu.layers.attention_base import AttentionLayer, Shape
from hpu.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from hpu.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from hpu.layers.metadata import AttentionInputs, AttentionMetadata, Visibility, distinct
from hpu.layers.metadata_builder import MetadataBuilder
from hpu.layers.mlp import GatedMLP
from hpu.layers.moe import Experts, MoE, SparseMixer, TopKRouter
from hpu.layers.norm import FullQKNorm, QKNorm, RMSNorm, UnweightedQKNorm
from hpu.models.base import LoadableModel
from hpu.ops.kernels import Kernels
from hpu.ops.rope import RotaryEmbedding, Rotation
from hpu.quantization.base import LinearMethod, QuantizationScheme
from hpu.quantization.unquantized import UNQUANTIZED


class DecoderLayer(nn.Module):
    """Attention and MLP with the norms before them; each adds `multiplier` times its output."""

    def __init__(
        self,
        self_attn: SelfAttention,
        mlp: GatedMLP | MoE,
        input_layernorm: RMSNorm,
        post_attention_layernorm: RMSNorm,
        *,
        multiplier: float,
        mlp_name: str,
    ) -> None:
        """`mlp_name`: that of the MLP among the modules."""
        super().__init__()
        self.self_attn = self_attn
        self._mlp_name = mlp_name
        self._modules[mlp_name] = mlp
        self.input_layernorm = input_layernorm
        self.post_attention_layernorm = post_attention_layernorm
        self._multiplier = multiplier

    @property
    def mlp(self) -> GatedMLP | MoE:
        return cast("GatedMLP | MoE", self._modules[self._mlp_name])

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        """(B, Q, hidden) to the same."""
        delta = self.self_attn(self.input_layernorm(hidden), rotation, metadata)
        hidden = torch.add(hidden, delta, alpha=self._multiplier)
        delta = self.mlp(self.post_attention_layernorm(hidden))
        return torch.add(hidden, delta, alpha=self._multiplier)


class DecoderModel(nn.Module):
    """From tokens to normed hidden states."""

    def __init__(
        self,
        embed_tokens: VocabParallelEmbedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        metadata: MetadataBuilder,
        rotary_embs: dict[str, RotaryEmbedding],
        ropes: list[str],
    ) -> None:
        """`rotary_embs` by the names in `ropes`, which has that of each layer."""
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.metadata = metadata
        self.rotary_emb = rotary_embs.get("default")
        self.local_rotary_emb = rotary_embs.get("local")
        self._ropes = ropes

    @property
    def rotary_embs(self) -> list[RotaryEmbedding]:
        """Those that layers use."""
        both = (self.rotary_emb, self.local_rotary_emb)
        return [one for one in both if one is not None]

    def forward(self, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        """(B, Q) to (B, Q, hidden)."""
        rotations: dict[str, Rotation] = {}
        if self.rotary_emb is not None:
            rotations["default"] = self.rotary_emb(inputs.positions)
        if self.local_rotary_emb is not None:
            rotations["local"] = self.local_rotary_emb(inputs.positions)
        metadata: AttentionMetadata = self.metadata(inputs)
        hidden: Tensor = self.embed_tokens(tokens)
        for layer, rope in zip(self.layers, self._ropes, strict=True):
            hidden = layer(hidden, rotations.get(rope), metadata)
        return self.norm(hidden)  # type: ignore[no-any-return]


class Decoder(LoadableModel):
    """A decoder. Parameters are allocated, not filled: hpu/model_loader/loader.py does
    that. Without a head it gives hidden states and no logits."""

    def __init__(
        self,
        config: ModelConfig,
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        length: int,
        has_head: bool = True,
        quantization: QuantizationScheme | None = None,
        group: ProcessGroup = SINGLE,
    ) -> None:
        """`length`: tokens of the longest sequence that will be served. `group`: the
        tensor-parallel ranks."""
        super().__init__()
        self.config = config
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.weight_map = decoder_weight_map(config, spec, has_head=has_head)
        self.shape = HeadShape(
            config.num_heads // group.size,
            config.kv_heads_per_rank(group.size),
            config.head_dim,
            spec.attention_scale or config.head_dim**-0.5,
        )
        self._group = group
        self._quantization = quantization
        self._tensor_names = self.weight_map.tensor_names()
        self._kinds = distinct(Visibility(layer.window, layer.chunk) for layer in spec.layers)
        self.model = DecoderModel(
            VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                multiplier=spec.embedding_multiplier,
                dtype=dtype,
                device=device,
                group=group,
            ),
            [self._layer(f"model.layers.{i}", layer) for i, layer in enumerate(spec.layers)],
            self._norm(),
            MetadataBuilder(
                self._kinds,
                causal=config.is_causal,
                alibi_slopes=self._alibi_slopes(),
                temperature=spec.temperature,
            ),
            self._rotary_embs(length),
            [layer.rope for layer in spec.layers],
        )
        self.lm_head = self._head() if has_head else None

    def _rotary_embs(self, length: int) -> dict[str, RotaryEmbedding]:
        config = self.config
        used = {layer.rope for layer in self.spec.layers}
        ropes = {"default": config.rope, "local": config.local_rope}
        return {
            name: RotaryEmbedding(config, rope, length=length, dtype=self.dtype, device=self.device)
            for name, rope in ropes.items()
            if rope is not None and name in used
        }

    def _alibi_slopes(self) -> Tensor | None:
        """(heads) of this rank."""
        if self.spec.alibi_max_bias is None:
            return None
        slopes = alibi_slopes(self.config.num_heads, self.spec.alibi_max_bias)
        first = self._group.rank * self.shape.num_heads
        mine = slopes[first : first + self.shape.num_heads]
        return torch.tensor(mine, dtype=torch.float32, device=self.device)

    def _head(self) -> ParallelLMHead:
        config = self.config
        path = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        head = ParallelLMHead(
            config.hidden_size,
            config.vocab_size,
            **self._options(path, config.hidden_size, is_head=True),
        )
        if config.tie_word_embeddings:
            head.weight = self.model.embed_tokens.weight
        return head

    def _norm(self) -> RMSNorm:
        config = self.config
        return RMSNorm(
            config.hidden_size, config.rms_norm_eps, dtype=self.dtype, device=self.device
        )

    def _layer(self, path: str, layer: LayerSpec) -> DecoderLayer:
        attention = {"dense": self._dense_attention}[layer.attention]
        make_mlp: Callable[[str], GatedMLP | MoE] = self._dense_mlp
        mlp_name = self.spec.mlp
        if self.spec.moe is not None and layer.feed_forward == "moe":
            make_mlp, mlp_name = self._moe, self.spec.moe.block
        return DecoderLayer(
            attention(f"{path}.self_attn", layer),
            make_mlp(f"{path}.{mlp_name}"),
            self._norm(),
            self._norm(),
            multiplier=self.spec.residual_multiplier,
            mlp_name=mlp_name,
        )

    def _dense_attention(self, path: str, layer: LayerSpec) -> SelfAttention:
        config, spec, shape = self.config, self.spec, self.shape
        visibility = Visibility(layer.window, layer.chunk)
        return SelfAttention(
            shape,
            qkv_proj=QKVParallelLinear(
                config.hidden_size,
                QKVParallelLinear.sizes(
                    config.num_heads, config.num_kv_heads, config.head_dim, self._group.size
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
            ),
        )

    def _qk_norm(self) -> QKNorm | FullQKNorm | UnweightedQKNorm | None:
        shape, eps = self.shape, self.config.rms_norm_eps
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        if self.spec.qk_norm == "heads":
            return QKNorm(heads + kv_heads, shape.head_dim, eps, **options)
        if self.spec.qk_norm == "all":
            return FullQKNorm(heads, kv_heads, shape.head_dim, eps, group=self._group, **options)
        if self.spec.qk_norm == "unweighted":
            return UnweightedQKNorm(eps)
        return None

    def _dense_mlp(self, path: str) -> GatedMLP:
        return self._mlp(path, self.config.intermediate_size)

    def _moe(self, path: str) -> MoE:
        config, moe, spec = self.config, self.config.moe, self.spec.moe
        assert moe is not None and spec is not None
        hidden = config.hidden_size
        if self._quantization is not None:
            raise ConfigError(
                f"{config.path} is a mixture of experts, whose weights are not quantized yet: "
                "leave quantization out"
            )
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        gate_dtype = torch.float32 if spec.float32_router else self.dtype
        shared = shared_gate = None
        if moe.shared_size:
            shared = self._mlp(f"{path}.shared_experts", moe.shared_size)
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
                moe.num_experts,
                hidden,
                moe.inner_size,
                activation=spec.clamped_swiglu or config.hidden_act,
                has_bias=spec.expert_bias,
                group=self._group,
                **options,
            ),
            shared,
            shared_gate,
            has_correction_bias=bool(spec.correction_bias),
            scales_input=spec.scales_input,
        )

    def _mlp(self, path: str, inner: int) -> GatedMLP:
        hidden = self.config.hidden_size
        has_bias = self.spec.mlp_bias
        return GatedMLP(
            MergedColumnParallelLinear(
                hidden,
                [inner, inner],
                bias=has_bias,
                **self._options(f"{path}.gate_up_proj", hidden),
            ),
            RowParallelLinear(
                inner,
                hidden,
                bias=has_bias,
                **self._options(f"{path}.down_proj", inner // self._group.size),
            ),
            self.config.hidden_act,
        )

    def _options(self, path: str, in_features: int, *, is_head: bool = False) -> dict[str, Any]:
        """Arguments of the linear layer at `path`, which has `in_features` inputs on this rank."""
        method: LinearMethod = UNQUANTIZED
        if self._quantization is not None:
            names = self._tensor_names[f"{path}.weight"]
            method = self._quantization.linear_method(names, in_features, is_head=is_head)
        return {
            "dtype": self.dtype,
            "device": self.device,
            "method": method,
            "group": self._group,
        }

    @property
    def layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return [layer.self_attn for layer in self.layers]

    def forward(self, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        return self.model(tokens, inputs)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """As CausalLM.logits, in the model's dtype."""
        assert self.lm_head is not None, "a decoder without a head gives no logits"
        logits: Tensor = self.lm_head(hidden)
        divisor = self.spec.logits_divisor
        return logits if divisor == 1 else logits / divisor

    def cache_shapes(self, num_blocks: int, block_size: int) -> list[tuple[Shape, Shape]]:
        slots = num_blocks * block_size
        return [attention.kv_cache_spec.shapes(slots) for attention in self.attention_layers]

    def bind_caches(self, caches: list[tuple[Tensor, Tensor]], block_size: int) -> None:
        for attention, (keys, values) in zip(self.attention_layers, caches, strict=True):
            attention.bind_caches(keys, values, block_size)
        self.model.metadata.block_size = block_size

    def read_contiguously(self) -> None:
        self.model.metadata.contiguous = True
        for attention in self.attention_layers:
            attention.zero_non_finite()

    def use_kernels(self, kernels: Kernels, *, split_qkv: bool = False) -> None:
        """Run on a device's fused kernels from now on. Once, before the first launch."""
        self.model.metadata.attention_form = kernels.attention_form(
            self.dtype, has_score_options=self.spec.has_score_options
        )
        for rotary_emb in self.model.rotary_embs:
            rotary_emb.restore_sin_sign()
        self.model.norm.use_kernel(kernels.rms_norm)
        for layer in self.layers:
            layer.input_layernorm.use_kernel(kernels.rms_norm)
            layer.post_attention_layernorm.use_kernel(kernels.rms_norm)
            if isinstance(layer.mlp, MoE):
                layer.mlp.experts.use_kernels(kernels)
        for attention in self.attention_layers:
            attention.use_kernels(kernels, split_qkv=split_qkv)
            # Their matrix products sum over all blocks of a launch, with zeros for the blocks of
            # other sequences.
            attention.zero_non_finite()


def _router(moe: MoEConfig, spec: MoESpec) -> TopKRouter | SparseMixer:
    if spec.sparse_mixer is not None:
        return SparseMixer(spec.sparse_mixer)
    return TopKRouter(
        moe.top_k,
        moe.renormalize,
        scoring=spec.scoring,
        num_groups=moe.num_groups,
        top_groups=moe.top_groups,
        scaling_factor=moe.scaling_factor,
    )
