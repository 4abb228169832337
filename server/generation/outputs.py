"""What the text pipeline takes and gives: prompts, deltas, outputs. Plain data; knows no engine."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its log-probability. `bytes` are the token's own UTF-8 bytes, whole or not."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    """Natural logarithm; what is impossible is written as -9999.0."""
    rank: int
    """1 for the most likely token of the vocabulary."""


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """One position: the chosen token, and the k most likely ones, greatest first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


@dataclass(slots=True)
class Delta:
    """What one choice has gained since its last delta.

    `text` is final: the deltas joined equal the detokenised output, cut at the stop.
    """

    index: int
    """prompt_index * n + choice."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    """One entry a token of `token_ids`, when asked for."""
    finish_reason: str | None = None
    """stop, length; set on the last delta of the choice."""
    stop_reason: str | int | None = None
    """The stop string or stop_token_ids entry; None for an end token."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine: checked against the vocabulary, already truncated."""

    token_ids: list[int]
    text: str | None = None
    """The text it came from, if it came from text."""


@dataclass(slots=True)
class Output:
    """All of one choice: its deltas joined."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    """Sum over the chosen tokens; None when log-probabilities were not asked for."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0


class Growing(Protocol):
    """The choices of one request as they grow, whatever makes them grow. Iterate it once: each item
    is all that is new over all choices, at most one delta a choice. Seconds are sums over time, of
    the slowest choice."""

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counted once, whatever n."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, of the first choice of each prompt."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """All tokens of all choices so far, end tokens and matched stops included."""
        ...

    @property
    def prompt_logprobs(self) -> list[list[PositionLogprobs | None] | None]:
        """One entry a prompt, None when not asked for. Whole once its first token has come; the
        first position has none."""
        ...

    @property
    def queue_s(self) -> float:
        """Seconds until the last choice left the waiting line."""
        ...

    @property
    def prefill_s(self) -> float:
        """Seconds in prefill."""
        ...

    @property
    def decode_s(self) -> float:
        """Seconds in decode."""
        ...

    def __aiter__(self) -> AsyncIterator[list[Delta]]: ...

    async def __anext__(self) -> list[Delta]: ...

    def abort(self) -> None:
        """Forget what is still open, now. Iteration ends; safe at any moment, and twice."""
        ...
