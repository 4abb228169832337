"""Log-probabilities of sampled, most likely and prompt tokens."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from config.params.sampling import MAX_LOGPROBS
from hpu.sampling.filters import first_argmax
from hpu.sampling.params import Params

MAX_PACKED = 1 << 24
"""Limit below which integers (tokens and ranks) are exact in float32."""


class LogprobsMode(NamedTuple):
    """Kind of values reported for sampled tokens; prompt tokens always have raw
    log-probabilities."""

    is_processed: bool = False
    """True: values after masks, bias and penalties, and for a drawn token also after temperature,
    min_p, top_k and top_p, which set tokens to -inf. False: values of the raw logits."""
    is_logits: bool = False
    """Whether to report logits instead of log-probabilities."""

    @classmethod
    def named(cls, name: str) -> "LogprobsMode":
        """Mode with this name of config.engine.LOGPROBS_MODES."""
        stage, kind = name.split("_")
        return cls(stage == "processed", kind == "logits")


RAW = LogprobsMode()


class TopLogprobs(NamedTuple):
    """Results of M positions: the chosen token first, then the k most likely tokens in descending
    order."""

    ids: Tensor
    """(M, k + 1) int32"""
    values: Tensor
    """(M, k + 1) float32: log-softmax of the logits, or the logits themselves."""
    ranks: Tensor
    """(M,) int32: 1 for the most likely token; tied tokens have the same rank."""

    @property
    def k(self) -> int:
        """Number of most likely tokens after the chosen token."""
        return int(self.ids.shape[1]) - 1


def pack(tokens: Tensor, top: TopLogprobs | None, k: int) -> Tensor:
    """Pack `tokens` (M,) and the ids, values and ranks of `top` (at most `k` tokens) into (M, 2k +
    4) float32, padded with zeros, so that a single copy brings them to the host. Values are
    converted, not reinterpreted, because not every device can reinterpret bits."""
    token = tokens.unsqueeze(1).float()
    if top is None:
        return functional.pad(token, (0, 2 * k + 3))
    ids, values = (functional.pad(x.float(), (0, k - top.k)) for x in (top.ids, top.values))
    return torch.cat((token, ids, values, top.ranks.unsqueeze(1).float()), dim=1)


def unpack(packed: Tensor) -> tuple[Tensor, TopLogprobs]:
    """Tokens (M,) int32 and log-probabilities of an output of `pack`, on the host."""
    ids, values = packed[:, 1:-1].tensor_split(2, dim=1)
    ranks = packed[:, -1].int()
    return packed[:, 0].int(), TopLogprobs(ids.int(), values, ranks)


def _most_likely(logits: Tensor, k: int) -> Tensor:
    """(M, k) ids in descending order of logits. The lowest token among ties for the maximum comes
    first, as in argmax; `topk` alone does not guarantee this."""
    # At least MAX_LOGPROBS: the choice of `topk` among ties may depend on its k, and the result
    # must not depend on other requests in the batch.
    size = min(max(k, MAX_LOGPROBS), logits.shape[1])
    ids = logits.topk(size, dim=-1).indices
    if logits.device.type == "cpu":
        first = logits.max(dim=-1, keepdim=True).indices
    else:
        first = first_argmax(logits).tokens
    # Move `first` to the front. If it is not among the ids, all ids tie with it, and the last id is
    # dropped.
    index = torch.arange(size, device=logits.device)
    position = torch.where(ids == first, index, size - 1).amin(-1, keepdim=True)
    source = index + (index > position)
    return torch.cat((first, ids), dim=-1).gather(1, source)[:, :k]


def top_logprobs(logits: Tensor, chosen: Tensor, k: int, *, normalises: bool = True) -> TopLogprobs:
    """Log-probabilities of the tokens `chosen` (M,) and of the `k` (at most V) most likely tokens,
    from `logits` (M, V). The values are the logits themselves if `normalises` is false.

    A chosen token of -1 (see SamplerOutput) is reported as token 0. A prompt token outside the
    vocabulary, such as an image placeholder, has the value -inf.
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
    """(B, V) logits from which the tokens of a batch were drawn; for greedy requests, the scores.

    Args:
        scores: (B, V) before the temperature.
        weights: (B, V), 0 for tokens removed by a filter.
    """
    zero = torch.zeros((), dtype=torch.float32, device=scores.device)
    has_cut = (params.min_p > 0) | (params.top_k > 0.5) | (params.top_p < 1)
    # Added instead of selected, so that NaN is preserved.
    cut_off = torch.where(has_cut & (weights <= 0), float("-inf"), zero)
    return torch.where(params.greedy > 0.5, scores, scores / params.temperature + cut_off)
