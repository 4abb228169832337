"""Draft heads that read a single hidden state of the target, without a KV cache: HiddenHead, their
base class, and HiddenHeadProposer, their drafts on the host."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from config.checkpoint.weight_maps.base import WeightMap
from config.model.model_config import ModelConfig
from config.speculation.drafter import HeadSizes
from hpu.layers.attention_base import Shape
from hpu.models.base import LoadableModel
from hpu.spec_decode.base import DraftingCosts, Proposal, Tokens
from hpu.spec_decode.launch_costs import LaunchCosts


class HiddenHead(LoadableModel):
    """Drafts several tokens from the target's hidden state of the token before the last known
    token. A subclass also takes the device."""

    def __init__(
        self, target: ModelConfig, sizes: HeadSizes, weight_map: WeightMap, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight_map = weight_map
        self.config, self.dtype = target, dtype
        self.hidden_width = sizes.hidden_size

    def drafts(
        self, hidden: Tensor, tokens: Tensor, count: int, greedy: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """`hidden` (M, hidden) and the next `tokens` (M,) -> (M, count) drafts after the tokens.
        `greedy` chooses tokens: (M, vocab) logits -> (M,), -1 where logits are not finite."""
        raise NotImplementedError

    def cache_shapes(
        self, num_blocks: int, block_size: int, num_rings: int = 0
    ) -> list[tuple[Shape, ...]]:
        return []

    def cache_windows(self) -> list[int | None]:
        return []

    def bind_caches(
        self, caches: list[tuple[Tensor, ...]], block_size: int, num_rings: int = 0
    ) -> None:
        return


@runtime_checkable
class HeadLauncher(Protocol):
    """Runs a head over hidden states of the target."""

    def drafts(
        self,
        req_indices: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int],
        count: int,
    ) -> list[list[int]]:
        """`count` drafts per request after `tokens`, from the target's hidden states at
        `positions`; -1 if logits are not finite."""
        ...

    def measure(self, max_rows: int) -> LaunchCosts:
        """Measure the time of drafting a token per request, by the number of requests."""
        ...


class HiddenHeadProposer:
    """Drafts with a head. Stateless: the target's hidden states are cached with its blocks."""

    def __init__(self, launcher: HeadLauncher) -> None:
        self._launcher = launcher

    def add_request(self, req_index: int, tokens: Tokens, *, is_private: bool = False) -> None:
        return

    def remove_request(self, req_index: int) -> None:
        return

    def propose(
        self, req_indices: Sequence[int], histories: Sequence[Tokens], limits: Sequence[int]
    ) -> list[Proposal]:
        proposals = [Proposal([]) for _ in req_indices]
        requested = [i for i, limit in enumerate(limits) if limit > 0]
        if not requested:
            return proposals
        found = self._launcher.drafts(
            [req_indices[i] for i in requested],
            # The last known token is not computed yet.
            [len(histories[i]) - 2 for i in requested],
            [int(histories[i][-1]) for i in requested],
            max(limits),
        )
        for i, tokens in zip(requested, found, strict=True):
            tokens = tokens[: limits[i]]
            end = tokens.index(-1) if -1 in tokens else len(tokens)
            proposals[i] = Proposal(tokens[:end])
        return proposals

    def measure(self, max_num_seqs: int) -> DraftingCosts:
        return DraftingCosts(self._launcher.measure(max_num_seqs), lambda req_index, count: 1)
