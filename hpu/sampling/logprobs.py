"""Log-probabilities of sampled, most likely and prompt tokens."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from config.params.sampling import MAX_LOGPROBS
from hpu.sampling.filters import first_argmax
from hpu.sampling.params import Params

MAX_PACKED = 1 << 24
"""Numbers below this are exact in float32: tokens and ranks."""


class LogprobsMode(NamedTuple):
    """What is reported for sampled tokens; prompt tokens always have raw log-probabilities."""

    is_processed: bool = False
    """After masks, bias and penalties, and for a drawn token after temperature, min_p, top_k and
    top_p, which leave -inf. Otherwise of the raw logits."""
    is_logits: bool = False
    """Logits instead of log-probabilities."""

    @classmethod
    def named(cls, name: str) -> "LogprobsMode":
        """One of config.engine.LOGPROBS_MODES."""
        stage, kind = name.split("_")
        return cls(stage == "processed", kind == "logits")


RAW = LogprobsMode()


class TopLogprobs(NamedTuple):
    """M positions: the chosen token first, then the k most likely in falling order."""

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


def pack(tokens: Tensor, top: TopLogprobs | None, k: int) -> Tensor:
    """(M, 2k + 4) float32: `tokens` (M,), and the ids, values and ranks of `top`, which has at most
    `k`; zeros for what is not there. One tensor, so that one copy takes all to the host; numbers,
    not bits, which not every device reinterprets."""
    token = tokens.unsqueeze(1).float()
    if top is None:
        return functional.pad(token, (0, 2 * k + 3))
    ids, values = (functional.pad(x.float(), (0, k - top.k)) for x in (top.ids, top.values))
    return torch.cat((token, ids, values, top.ranks.unsqueeze(1).float()), dim=1)


def unpack(packed: Tensor) -> tuple[Tensor, TopLogprobs]:
    """(M,) int32 tokens and the log-probabilities of `pack`, on the host."""
    ids, values = packed[:, 1:-1].tensor_split(2, dim=1)
    ranks = packed[:, -1].int()
    return packed[:, 0].int(), TopLogprobs(ids.int(), values, ranks)


def _most_likely(logits: Tensor, k: int) -> Tensor:
    """(M, k) ids in falling order; of tokens that tie for the maximum the lowest comes first, as in
    argmax, which `topk` does not guarantee."""
    # At least MAX_LOGPROBS: which of two ties `topk` drops may depend on its k, which must not
    # depend on the other requests of the batch.
    size = min(max(k, MAX_LOGPROBS), logits.shape[1])
    ids = logits.topk(size, dim=-1).indices
    if logits.device.type == "cpu":
        first = logits.max(dim=-1, keepdim=True).indices
    else:
        first = first_argmax(logits).tokens
    # Move `first` to the front. If it is not among the ids, all of them tie with it, and the last
    # one is dropped.
    index = torch.arange(size, device=logits.device)
    position = torch.where(ids == first, index, size - 1).amin(-1, keepdim=True)
    source = index + (index > position)
    return torch.cat((first, ids), dim=-1).gather(1, source)[:, :k]


def top_logprobs(logits: Tensor, chosen: Tensor, k: int, *, normalises: bool = True) -> TopLogprobs:
    """Of `logits` (M, V) for the tokens `chosen` (M,), with the `k` most likely (at most V).

    A chosen token of -1 (non-finite logits) is reported as token 0. A token of a prompt that is
    behind the vocabulary, as that of an image, has the log-probability -inf.
    """
    logits = logits.float()
    k = min(k, logits.shape[1])
    chosen = chosen.long().clamp(min=0).unsqueeze(1)
    values = torch.log_softmax(logits, dim=-1) if normalises else logits
    ids = torch.cat((chosen, _most_likely(logits, k)), dim=-1) if k else chosen
    is_outside = ids >= logits.shape[1]
    inside = ids.masked_fill(is_outside, 0)
    ranks = (logits > logits.gather(1, inside[:, :1])).sum(-1, dtype=torch.int32) + 1
    found = values.gather(1, inside).masked_fill(is_outside, float("-inf"))
    return TopLogprobs(ids.to(torch.int32), found, ranks)


def processed_logits(scores: Tensor, weights: Tensor, params: Params) -> Tensor:
    """(B, V) the logits that tokens of a batch were drawn from; of greedy requests the scores.

    `scores` (B, V) are before the temperature; `weights` (B, V) are 0 for tokens that a filter cut
    off.
    """
    zero = torch.zeros((), dtype=torch.float32, device=scores.device)
    has_cut = (params.min_p > 0) | (params.top_k > 0.5) | (params.top_p < 1)
    # Added, so that a NaN stays one.
    cut_off = torch.where(has_cut & (weights <= 0), float("-inf"), zero)
    return torch.where(params.greedy > 0.5, scores, scores / params.temperature + cut_off)
