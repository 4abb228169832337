"""The text pipeline: a prompt goes in as token ids, text deltas come out. Knows no HTTP."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its log-probability. `bytes` are the token's own UTF-8 bytes, whole or not."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    rank: int


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
