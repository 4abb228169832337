"""Drafting with an EAGLE-3 head. Source: vLLM's llama_eagle3.py."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from config.checkpoint.safetensors_files import read_header, weight_files
from config.checkpoint.weight_maps.base import WeightMap
from config.errors import CheckpointError, ConfigError
from config.model.model_config import ModelConfig
from config.speculation.eagle3 import FACTS, draft_vocab_size
from hpu.layers.attention import SelfAttention
from hpu.layers.embedding import ParallelLMHead
from hpu.layers.linear import QKVParallelLinear
from hpu.layers.metadata import AttentionInputs, AttentionMetadata
from hpu.layers.norm import RMSNorm
from hpu.models.decoder import Decoder
from hpu.models.decoder_layer import DecoderLayer
from hpu.ops.rope import Rotation
from hpu.spec_decode.draft_head import DraftHead
from hpu.spec_decode.drafter import HeadDrafter


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

    def __init__(self, decoder: Decoder, target: ModelConfig, weight_map: WeightMap) -> None:
        width = FACTS.num_kept_layers * target.hidden_size
        super().__init__(decoder, weight_map, hidden_width=width, in_features=width)
        config, spec, group = decoder.config, decoder.spec, decoder.group
        vocab_size = draft_vocab_size(config)
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
        self._kept_layers = FACTS.kept_layers(config, target.num_layers)
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


DRAFTERS = {"eagle3": HeadDrafter(Eagle3Head)}
