"""Drafting with the layer for multi-token prediction (MTP) of DeepSeek-V3 and GLM-4.5. Source:
vLLM's deepseek_mtp.py."""

from typing import Any

import torch
from torch import Tensor

from config.checkpoint.weight_maps.base import WeightMap
from config.model.model_config import ModelConfig
from hpu.layers.metadata import AttentionInputs
from hpu.layers.norm import RMSNorm
from hpu.models.decoder import Decoder
from hpu.spec_decode.draft_head import DraftHead
from hpu.spec_decode.drafter import HeadDrafter


class MtpHead(DraftHead):
    """MTP head: projection of normed embeddings and normed hidden states, then a decoder layer."""

    def __init__(self, decoder: Decoder, target: ModelConfig, weight_map: WeightMap) -> None:
        config = decoder.config
        hidden = config.hidden_size
        super().__init__(decoder, weight_map, hidden_width=hidden, in_features=2 * hidden)
        options: dict[str, Any] = {"dtype": decoder.dtype, "device": decoder.device}
        self.enorm, self.hnorm, self.norm = (
            RMSNorm(hidden, config.rms_norm_eps, **options) for _ in range(3)
        )
        self.model.norm = None

    def draft(
        self, tokens: Tensor, inputs: AttentionInputs, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        # vLLM masks the embedding at position 0, too.
        embeds = self.embed(tokens).masked_fill((inputs.positions == 0).unsqueeze(-1), 0)
        both = torch.cat((self.enorm(embeds), self.hnorm(hidden)), dim=-1)
        out = self.model(self.fc(both), inputs)
        return self.norm(out), out


DRAFTERS = {"mtp": HeadDrafter(MtpHead)}
