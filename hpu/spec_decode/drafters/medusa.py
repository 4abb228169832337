"""Drafting with Medusa heads. Source: vLLM's medusa.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from config.checkpoint.weight_maps.base import WeightMap
from config.model.model_config import ModelConfig
from config.speculation.drafter import HeadSizes
from config.speculation.medusa import MedusaSizes
from hpu.layers.linear import ReplicatedLinear
from hpu.spec_decode.drafter import HiddenHeadDrafter
from hpu.spec_decode.hidden_heads import HiddenHead


class MedusaHead(HiddenHead):
    """Medusa: residual blocks and an output head per draft position."""

    def __init__(
        self,
        target: ModelConfig,
        sizes: HeadSizes,
        weight_map: WeightMap,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(target, sizes, weight_map, dtype)
        assert isinstance(sizes, MedusaSizes)
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        hidden = sizes.hidden_size
        self.blocks = nn.ModuleList()
        self.lm_heads = nn.ModuleList()
        for _ in range(sizes.num_heads):
            layers = nn.ModuleList(
                ReplicatedLinear(hidden, hidden, bias=sizes.has_bias, **options)
                for _ in range(sizes.num_blocks)
            )
            self.blocks.append(nn.ModuleDict({"layers": layers}))
            self.lm_heads.append(ReplicatedLinear(hidden, sizes.vocab_size, **options))

    def drafts(
        self, hidden: Tensor, tokens: Tensor, count: int, greedy: Callable[[Tensor], Tensor]
    ) -> Tensor:
        found = []
        for block, head in zip(self.blocks[:count], self.lm_heads[:count], strict=True):
            own = hidden
            for layer in block.get_submodule("layers").children():
                own = own + functional.silu(layer(own))
            found.append(greedy(head(own)))
        return torch.stack(found, dim=1)


DRAFTERS = {"medusa": HiddenHeadDrafter(MedusaHead)}
