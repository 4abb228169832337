"""Log-probabilities of chosen and most likely tokens, from raw logits. Knows no rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from config.sampling import MAX_LOGPROBS


class TopLogprobs(NamedTuple):
    """M positions: the chosen token first, then the k most likely, greatest first."""

    ids: Tensor
    """(M, k + 1) int32"""
    values: Tensor
    """(M, k + 1) float32: log-softmax of the raw logits"""
    ranks: Tensor
    """(M,) int32: 1 for the most likely token; tokens that tie share the better rank"""

    @property
    def k(self) -> int:
        """How many most likely tokens follow the chosen one."""
        return int(self.ids.shape[1]) - 1


def _most_likely(logits: Tensor, k: int) -> Tensor:
    """(M, k) ids, greatest first; of all that tie for the first place the lowest id comes first,
    as in a greedy choice, which `topk` alone does not promise."""
    # Always at least MAX_LOGPROBS: which of two ties `topk` drops may depend on how many it is
    # asked for, and that must not depend on what other rows of the batch want.
    size = min(max(k, MAX_LOGPROBS), logits.shape[1])
    found = logits.topk(size, dim=-1).indices
    first = logits.max(dim=-1, keepdim=True).indices
    # Moves `first` to the front: everything before its old place goes back by one. If it was not
    # found, all that was found ties with it, and the last one gives way.
    index = torch.arange(size, device=logits.device)
    place = torch.where(found == first, index, size - 1).amin(-1, keepdim=True)
    source = index + (index > place)
    return torch.cat((first, found), dim=-1).gather(1, source)[:, :k]


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> TopLogprobs:
    """Of `logits` (M, V) for the tokens `chosen` (M,), with the `k` most likely (at most V).

    A chosen token of -1 (logits were not numbers) is reported as token 0 with whatever value
    came out.
    """
    logits = logits.float()
    k = min(k, logits.shape[1])
    chosen = chosen.long().clamp(min=0).unsqueeze(1)
    values = torch.log_softmax(logits, dim=-1)
    ids = torch.cat((chosen, _most_likely(logits, k)), dim=-1) if k else chosen
    ranks = (logits > logits.gather(1, chosen)).sum(-1, dtype=torch.int32) + 1
    return TopLogprobs(ids.to(torch.int32), values.gather(1, ids), ranks)


def prompt_logprobs(logits: Tensor, targets: Tensor, k: int) -> TopLogprobs:
    """Of the prompt tokens `targets` (M,) that follow the positions of `logits` (M, V)."""
    return top_logprobs(logits, targets, k)
