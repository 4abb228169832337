"""Prompts, deltas, outputs and timings of the generation pipeline, and its stream protocols."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from server.generation.logprobs import PositionLogprobs, PromptLogprobs
from server.multimodal.parts import PromptImages


@dataclass(slots=True)
class Delta:
    """New output of a choice since its last delta. `text` is final: the concatenated deltas are the
    detokenized output, cut at the stop string."""

    index: int
    """Index of the choice in the request: prompt_index * n + choice."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    """One entry per token of `token_ids`; None unless requested."""
    finish_reason: str | None = None
    """`stop` or `length`; set only on the last delta of the choice."""
    stop_reason: str | int | None = None
    """The stop string or stop_token_ids entry that ended the choice; None if something else did."""
    num_merged: int = field(default=0, compare=False)
    """See Update.num_merged."""

    @property
    def is_last(self) -> bool:
        """Whether this is the last delta of the choice."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized and truncated prompt."""

    token_ids: list[int]
    text: str | None = None
    """Text of the prompt before truncation, or None."""
    images: PromptImages | None = None
    """Images and videos of the prompt; None without them."""


@dataclass(slots=True)
class Output:
    """Complete output of a choice: all its deltas concatenated."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Append `delta`."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += delta.logprobs
        if delta.is_last:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the chosen tokens; None unless requested."""
        if self.logprobs is None:
            return None
        return sum(position.chosen.logprob for position in self.logprobs)


@dataclass(slots=True)
class Timing:
    """Queue, prefill and decode times in seconds, of a sequence or of a request.

    Times of a sequence are the engine's own if the engine has finished the sequence; otherwise, for
    example after a stop string, they are measured by the API server. Times of a request are maxima
    over its sequences; the decode time of a beam search is measured by the API server.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class RequestStream(Protocol):
    """Output stream of a request. Iterate it once: each item has new output, at most one delta per
    choice."""

    @property
    def engine(self) -> int:
        """Engine of the first sequence; for pooling, of the oldest input in an engine."""
        ...

    @property
    def num_sequences(self) -> int:
        """Number of choices, over all prompts."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens; each prompt is counted once, independent of n."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache by the first choice of each prompt."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices so far, including end tokens and matched stop strings."""
        ...

    @property
    def timing(self) -> Timing:
        """Times of the request, over all choices."""
        ...

    def __aiter__(self) -> AsyncIterator[list[Delta]]: ...

    async def __anext__(self) -> list[Delta]: ...

    def abort(self) -> None:
        """Abort the unfinished choices in the engine; if there are any, the iteration ends. May be
        called at any time and more than once."""
        ...


class GenerationStream(RequestStream, Protocol):
    """Output stream of a text-generation request."""

    @property
    def prompt_logprobs(self) -> list[PromptLogprobs | None]:
        """Log-probabilities of each prompt; None unless requested. They are complete once the
        prompt's first output token has arrived, or the request has ended."""
        ...

    @property
    def num_unread_bytes(self) -> int:
        """Estimated memory of the output that has not been read yet."""
        ...


StreamT = TypeVar("StreamT", bound=RequestStream)
