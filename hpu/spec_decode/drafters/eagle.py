"""Drafting with an EAGLE head. Source: vLLM's llama_eagle.py."""

import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.base import WeightMap
from config.model.model_config import ModelConfig
from hpu.layers.metadata import AttentionInputs
from hpu.models.decoder import Decoder
from hpu.spec_decode.draft_head import DraftHead
from hpu.spec_decode.drafter import HeadDrafter


class EagleHead(DraftHead):
    """EAGLE head: projection of embeddings and hidden states, then a decoder layer."""

    def __init__(self, decoder: Decoder, target: ModelConfig, weight_map: WeightMap) -> None:
        hidden = decoder.config.hidden_size
        super().__init__(
            decoder, weight_map, hidden_width=target.hidden_size, in_features=2 * hidden
        )
        self.model.norm = None
        decoder.layers[0].input_layernorm = nn.Identity()  # type: ignore[assignment]

    def draft(
        self, tokens: Tensor, inputs: AttentionInputs, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = self.model(self.fc(torch.cat((self.embed(tokens), hidden), dim=-1)), inputs)
        return out, out


DRAFTERS = {"eagle": HeadDrafter(EagleHead)}
