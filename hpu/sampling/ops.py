"""SamplerOps: the sampler's operations on a device, with exact shapes (ExactOps) or static shapes
(StaticOps), and the functions that both kinds use."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hpu.backends.base import Backend
from hpu.protocol import TOKENS_PER_WORD
from hpu.sampling.bitmask import GrammarBitmasks
from hpu.sampling.filters import Argmax
from hpu.sampling.logprobs import TopLogprobs
from hpu.sampling.params import Params, SamplingColumns, Stages
from hpu.sampling.tables import SamplingTables

TokensOf = Callable[..., Tensor]


def _append_nothing(accepted: Tensor) -> None:
    """No-op: the sampled tokens are already appended."""


class SamplerOutput(NamedTuple):
    """Tokens sampled by a launch, on the device. Entries beyond the real requests are padding."""

    tokens: Tensor
    """(rows of the logits,) of the index type; -1 if the largest score is non-finite: NaN or
    positive infinity in the logits, or all tokens banned."""
    logprobs: TopLogprobs | None
    """Log-probabilities of `tokens`; None if no request needs them. k is at least the largest
    requested number."""
    pinned: tuple[Tensor, ...] = ()
    """Host tensors of uploads, to be kept until the launch is done."""
    append: Callable[[Tensor], None] = _append_nothing
    """Appends accepted tokens (B, 1 + K) to the tables, after a launch that samples drafts."""
    limits: Tensor | None = None
    """(B,): maximum number of drafts of each request that may be accepted, because later drafts
    have no bitmask; None without drafts or without a grammar."""


class SamplingState(NamedTuple):
    """Sampling state of all requests."""

    columns: SamplingColumns
    tables: SamplingTables
    bitmasks: GrammarBitmasks


class SamplingLaunch(NamedTuple):
    """A launch to sample. The upload of its inputs has started."""

    indices: npt.NDArray[np.int64]
    """Request indices, in the order of the first rows of the logits."""
    stages: Stages
    width: int
    """Batch width: number of requests, including padding."""
    pinned: list[Tensor]
    """Host tensors of the uploads, to be kept until the launch is done."""


class SamplerOps(Protocol):
    """Operations of the sampler. B: batch width, V: vocabulary."""

    accepts_argmax: bool
    """Whether greedy requests may get the argmax from the model instead of `sample`."""

    def begin(self, indices: npt.NDArray[np.int64], stages: Stages, width: int) -> SamplingLaunch:
        """Start the upload of a launch's inputs."""
        ...

    def params(self, width: int) -> Tensor:
        """(len(Params) * width,) float32: device tensor of the last uploaded parameters."""
        ...

    def sample(self, logits: Tensor, launch: SamplingLaunch) -> SamplerOutput:
        """Sample a token for each row of `logits` (B, V), which stay unmodified, and append the
        tokens to the tables."""
        ...

    def greedy(self, logits: Tensor) -> Tensor:
        """(B,) argmax of `logits` (B, V); see SamplerOutput.tokens."""
        ...

    def fused_function(self, stages: Stages) -> TokensOf | None:
        """Fused sampler as a pure, uncompiled function: maps logits, and params if `stages` draw,
        to tokens. None if no function covers `stages`."""
        ...


def word_bits(backend: Backend) -> Tensor:
    """(TOKENS_PER_WORD,) int32 with one bit set each, lowest first. Avoids shifts on the device,
    because words are signed."""
    bits = backend.zeros((TOKENS_PER_WORD,), torch.int32)
    host = backend.host_tensor(TOKENS_PER_WORD, torch.int32)
    host.numpy()[:] = (1 << np.arange(TOKENS_PER_WORD)).astype(np.uint32).view(np.int32)
    backend.upload(bits, host)
    # The upload still reads `host`.
    backend.synchronize()
    return bits


def finite_tokens(chosen: Argmax, dtype: torch.dtype) -> Tensor:
    """(B,) tokens as `dtype`, -1 if the largest score is non-finite."""
    tokens = torch.where(chosen.values.isfinite(), chosen.tokens, -1)
    return tokens.squeeze(1).to(dtype)


def minus_inf(banned: Tensor) -> Tensor:
    """-inf where banned, else 0. Masks add it instead of overwriting, so that NaN stays NaN."""
    zero = torch.zeros((), dtype=torch.float32, device=banned.device)
    return torch.where(banned, float("-inf"), zero)


def grammar_bias(scores: Tensor, words: Tensor, bits: Tensor) -> Tensor:
    """(B, V) values to add to `scores`: -inf where the bitmasks `words` (B * W,) ban the token,
    else 0. `bits`: see `word_bits`."""
    banned = (words.view(len(scores), -1, 1) & bits) == 0
    return minus_inf(banned.view(len(scores), -1)[:, : scores.shape[1]])


def bad_word_ends(words: Tensor, last_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(B, W) last token of each of `words` (B, W, L + 1), and (B, W) values to add to its score:
    -inf if the token would complete the word after `last_tokens` (B, N >= L), else 0."""
    prefixes, ends = words[:, :, :-1], words[:, :, -1]
    recent = last_tokens[:, -prefixes.shape[2] :].unsqueeze(1)
    completes = ((prefixes == recent) | (prefixes == 0)).all(-1) & (ends > 0)
    return (ends - 1).clamp(min=0), minus_inf(completes)


def penalized(scores: Tensor, counts: Tensor, params: Params) -> Tensor:
    """Scores (B, V) after repetition, frequency and presence penalties; `counts`: see
    SamplingTables."""
    generated = counts >= 1
    repeated = torch.where(scores > 0, scores / params.repetition, scores * params.repetition)
    scores = torch.where(counts > 0, repeated, scores)
    out: Tensor = scores - params.frequency * counts.floor() - params.presence * generated
    return out
