"""Log-probabilities of chosen and most likely tokens, and what they are of. Knows no rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from config.params.sampling import MAX_LOGPROBS


class LogprobsMode(NamedTuple):
    """What is reported of sampled tokens; prompts' are always raw log-probabilities."""

    is_processed: bool = False
    """What a token was chosen from: after masks, bias, penalties, and where it was drawn after
    temperature, min_p, top_k and top_p, which leave -inf. Else what the model says."""
    is_logits: bool = False
    """Not normalised."""

    @classmethod
    def named(cls, name: str) -> "LogprobsMode":
        """One of config.engine.LOGPROBS_MODES."""
        place, kind = name.split("_")
        return cls(place == "processed", kind == "logits")


RAW = LogprobsMode()


class TopLogprobs(NamedTuple):
    """M positions: the chosen token first, then the k most likely, greatest first."""

    ids: Tensor
    """(M, k + 1) int32"""
    values: Tensor
    """(M, k + 1) float32: log-softmax of the logits, or the logits themselves"""
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


def top_logprobs(logits: Tensor, chosen: Tensor, k: int, *, normalises: bool = True) -> TopLogprobs:
    """Of `logits` (M, V) for the tokens `chosen` (M,), with the `k` most likely (at most V).

    A chosen token of -1 (logits were not numbers) is reported as token 0 with whatever value
    came out.
    """
    logits = logits.float()
    k = min(k, logits.shape[1])
    chosen = chosen.long().clamp(min=0).unsqueeze(1)
    values = torch.log_softmax(logits, dim=-1) if normalises else logits
    ids = torch.cat((chosen, _most_likely(logits, k)), dim=-1) if k else chosen
    ranks = (logits > logits.gather(1, chosen)).sum(-1, dtype=torch.int32) + 1
    return TopLogprobs(ids.to(torch.int32), values.gather(1, ids), ranks)


def processed_logits(
    scores: Tensor, weights: Tensor, *, greedy: Tensor, temperature: Tensor, cuts: Tensor
) -> Tensor:
    """(B, V) what tokens were chosen from. `scores` (B, V) come before the temperature; `weights`
    (B, V) are 0 where min_p, top_k or top_p cut a token off, in rows of which `cuts` says that they
    may. (B, 1) are `greedy`, whose scores stay, `temperature` and `cuts`."""
    zero = torch.zeros((), dtype=torch.float32, device=scores.device)
    # Added, so that a NaN stays one.
    drawn = scores / temperature + torch.where(cuts & (weights <= 0), float("-inf"), zero)
    return torch.where(greedy, scores, drawn)


def prompt_logprobs(logits: Tensor, targets: Tensor, k: int) -> TopLogprobs:
    """Of the prompt tokens `targets` (M,) that follow the positions of `logits` (M, V)."""
    return top_logprobs(logits, targets, k)
