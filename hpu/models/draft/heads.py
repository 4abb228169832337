"""Draft heads with a KV cache: EAGLE, EAGLE-3, and the multi-token prediction (MTP) layer of
DeepSeek-V3 and GLM-4.5. Sources: vLLM's llama_eagle.py, llama_eagle3.py and deepseek_mtp.py.

Position i of a head reads token i + 1 of the text and the target's hidden state of token i. The
output replaces the target's hidden state of token i + 1 where the target has not computed it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from config.checkpoint.safetensors_files import read_header, weight_files
from config.checkpoint.weight_maps.draft_heads import (
    eagle3_weight_map,
    eagle_weight_map,
    mtp_weight_map,
)
from config.errors import CheckpointError, ConfigError
from config.model.architectures import decoder_spec
from config.model.model_config import ModelConfig
from config.parallel import Stage
from config.params.speculation import EAGLE, EAGLE3, MTP
from hpu.layers.attention import SelfAttention
from hpu.layers.attention_base import Shape
from hpu.layers.embedding import ParallelLMHead
from hpu.layers.linear import QKVParallelLinear, ReplicatedLinear
from hpu.layers.metadata import AttentionInputs, AttentionMetadata
from hpu.layers.norm import RMSNorm
from hpu.models.base import CausalLM, LoadableModel, ModelBuild
from hpu.models.decoder import Decoder
from hpu.models.decoder_layer import DecoderLayer
from hpu.ops.kernels import Kernels
from hpu.ops.rope import Rotation
from hpu.quantization.kv_cache import KVCacheFormat


class LastLayer(Stage):
    """Pipeline stage that has only the last layer and receives hidden states."""

    def layers(self, num_layers: int) -> range:
        return range(num_layers - 1, num_layers)


LAST_LAYER = LastLayer(1, 2)


class DraftHead(LoadableModel):
    """Decoder with a single layer. It shares the embedding of the target and, except for EAGLE-3,
    its output head."""

    def __init__(self, decoder: Decoder, *, hidden_width: int, in_features: int) -> None:
        """`hidden_width`: width of the target's hidden states that the head reads per token.
        `in_features`: inputs of the projection."""
        super().__init__()
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
        """Layers of the decoder."""
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


class EagleHead(DraftHead):
    """EAGLE head: projection of embeddings and hidden states, then a decoder layer."""

    def __init__(self, decoder: Decoder, target: ModelConfig) -> None:
        hidden = decoder.config.hidden_size
        super().__init__(decoder, hidden_width=target.hidden_size, in_features=2 * hidden)
        self.weight_map = eagle_weight_map(decoder.config, decoder.spec)
        self.model.norm = None
        decoder.layers[0].input_layernorm = nn.Identity()  # type: ignore[assignment]

    def draft(
        self, tokens: Tensor, inputs: AttentionInputs, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = self.model(self.fc(torch.cat((self.embed(tokens), hidden), dim=-1)), inputs)
        return out, out


class Eagle3Layer(DecoderLayer):
    """EAGLE-3 layer: attention reads normed embeddings and normed hidden states, concatenated;
    the outputs of attention and MLP are added to the hidden states."""

    hidden_norm: RMSNorm

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, metadata: AttentionMetadata
    ) -> Tensor:
        """(B, Q, 2 * hidden) -> (B, Q, hidden)."""
        embeds, hidden = hidden.chunk(2, dim=-1)
        normed = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)
        hidden = self._add(hidden, self.self_attn(normed, rotation, metadata))
        return self._add(hidden, self.mlp(self.post_attention_layernorm(hidden)))


class Eagle3Head(DraftHead):
    """EAGLE-3 head: projection of hidden states of three target layers, then an Eagle3Layer."""

    d2t: Tensor
    """(draft vocabulary,): offset from the index of a logit to its token id."""

    def __init__(self, decoder: Decoder, target: ModelConfig) -> None:
        width = 3 * target.hidden_size
        super().__init__(decoder, hidden_width=width, in_features=width)
        config, spec, group = decoder.config, decoder.spec, decoder.group
        vocab_size = config.fields.count("draft_vocab_size", config.vocab_size)
        self.weight_map = eagle3_weight_map(
            config, spec, target_hidden=target.hidden_size, draft_vocab=vocab_size
        )
        options: dict[str, Any] = {"dtype": decoder.dtype, "device": decoder.device}
        old = decoder.layers[0]
        attention = old.self_attn
        if not isinstance(attention, SelfAttention) or decoder.spec.arrangement != "before":
            raise ConfigError(
                f"{config.path} is an EAGLE-3 head for a {config.architecture}, which is not "
                "supported"
            )
        attention.qkv_proj = QKVParallelLinear(
            2 * config.hidden_size,
            QKVParallelLinear.sizes(
                config.num_heads, config.num_kv_heads, config.head_dim, group.size
            ),
            bias=spec.qkv_bias,
            group=group,
            **options,
        )
        norms = {
            "input_layernorm": old.input_layernorm,
            "post_attention_layernorm": old.post_attention_layernorm,
            "hidden_norm": RMSNorm(config.hidden_size, config.rms_norm_eps, **options),
        }
        layer = Eagle3Layer(
            attention, old.mlp, norms, multiplier=spec.residual_multiplier, mlp_name=spec.mlp
        )
        self.model.layers = nn.ModuleList([layer])
        self.model.input_width = 2 * config.hidden_size
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **options)
        self.model.norm = None
        self.lm_head = ParallelLMHead(config.hidden_size, vocab_size, group=group, **options)
        self._vocab_size = config.vocab_size
        self._kept_layers = eagle3_kept_layers(config, target.num_layers)
        d2t = _read_d2t(config.path, vocab_size, config.vocab_size)
        self.d2t = d2t.to(decoder.device, torch.int32)

    @property
    def kept_layers(self) -> tuple[int, ...]:
        return self._kept_layers

    def combine(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.fc(hidden)
        return found

    def draft(
        self, tokens: Tensor, inputs: AttentionInputs, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = self.model(torch.cat((self.embed(tokens), hidden), dim=-1), inputs)
        return self.norm(out), out

    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.lm_head(hidden)
        return found

    def argmax(self, hidden: Tensor) -> Tensor | None:
        return None

    def tokens_of(self, chosen: Tensor) -> Tensor:
        offsets = self.d2t.index_select(0, chosen.clamp(min=0))
        return torch.where(chosen < 0, chosen, chosen + offsets)


class MtpHead(DraftHead):
    """MTP head: projection of normed embeddings and normed hidden states, then a decoder layer."""

    def __init__(self, decoder: Decoder, target: ModelConfig) -> None:
        config = decoder.config
        hidden = config.hidden_size
        super().__init__(decoder, hidden_width=hidden, in_features=2 * hidden)
        self.weight_map = mtp_weight_map(config, decoder.spec)
        options: dict[str, Any] = {"dtype": decoder.dtype, "device": decoder.device}
        self.enorm, self.hnorm, self.norm = (
            RMSNorm(hidden, config.rms_norm_eps, **options) for _ in range(3)
        )
        self.model.norm = None

    def draft(
        self, tokens: Tensor, inputs: AttentionInputs, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        # The first position has no previous token to predict from.
        embeds = self.embed(tokens).masked_fill((inputs.positions == 0).unsqueeze(-1), 0)
        both = torch.cat((self.enorm(embeds), self.hnorm(hidden)), dim=-1)
        out = self.model(self.fc(both), inputs)
        return self.norm(out), out


HEADS: Mapping[str, Callable[[Decoder, ModelConfig], DraftHead]] = {
    EAGLE: EagleHead,
    EAGLE3: Eagle3Head,
    MTP: MtpHead,
}
"""Draft head by speculation method."""


def build_draft_head(
    method: str,
    config: ModelConfig,
    target: ModelConfig,
    build: ModelBuild,
) -> DraftHead:
    """Draft head of `method` for `target` with empty parameters, this rank's shard. Uses the last
    layer of `config`. Raises ConfigError for a head that is not supported."""
    own = replace(build, stage=LAST_LAYER)
    decoder = Decoder(config, decoder_spec(config), own, has_head=False)
    return HEADS[method](decoder, target)


def eagle3_kept_layers(config: ModelConfig, num_layers: int) -> tuple[int, ...]:
    """Kept layers of an EAGLE-3 head for a target of `num_layers`, from config.json or by default;
    see DraftHead.kept_layers. Raises ConfigError unless they are 3 of these layers."""
    names = "eagle_aux_hidden_state_layer_ids"
    raw = config.fields.raw
    own = raw.get("eagle_config")
    found = raw.get(names) or (own.get(names) if isinstance(own, dict) else None)
    layers = found if found is not None else [2, num_layers // 2, num_layers - 3]
    if not (isinstance(layers, list) and len(layers) == 3) or not all(
        type(layer) is int and 0 <= layer < num_layers for layer in layers
    ):
        raise ConfigError(
            f"{config.path} reads hidden states before the layers {layers}, it must be 3 of the "
            f"{num_layers} layers of the target"
        )
    return tuple(layers)


def _read_d2t(folder: str, size: int, vocab_size: int) -> Tensor:
    """Read d2t: (size,) int64. Zeros if the head has the whole vocabulary and the files have no
    d2t."""
    for file in weight_files(Path(folder)):
        for stored in read_header(file):
            if stored.name.removeprefix("model.") == "d2t":
                if stored.dtype != "I64" or stored.shape != (size,):
                    raise CheckpointError(
                        f"d2t in {file} is {stored.dtype} of {stored.shape}, it must be I64 of "
                        f"{(size,)} (draft_vocab_size)"
                    )
                offsets = np.fromfile(file, "<i8", size, offset=stored.offset)
                tokens = offsets + np.arange(size)
                if tokens.min() < 0 or tokens.max() >= vocab_size:
                    raise CheckpointError(
                        f"d2t in {file} names the tokens {tokens.min()} to {tokens.max()}, the "
                        f"vocabulary has {vocab_size}"
                    )
                return torch.from_numpy(offsets)
    if size != vocab_size:
        raise CheckpointError(
            f"{folder} has draft_vocab_size {size}, below the vocabulary size {vocab_size}, and "
            "no tensor d2t that maps the draft tokens"
        )
    return torch.zeros(size, dtype=torch.int64)
