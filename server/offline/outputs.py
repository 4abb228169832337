"""Return types of `LLM`: the classes and fields of vLLM's offline API."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from server.generation.beam_search import Beam
from server.generation.outputs import Output, PositionLogprobs, Prompt
from server.pooling.pipeline import Vectors
from server.text.tokenizer import Tokenizer

OutputData = TypeVar("OutputData")


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    """One entry a token, the chosen one and the most likely ones by id; None if not asked for."""
    finish_reason: str | None
    """stop or length."""
    stop_reason: str | int | None
    """The stop string or stop token id; None for an end token."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt with all its choices."""

    request_id: str
    prompt: str | None
    """The text, if the prompt came as text."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """One entry a prompt token, None for the first; None if not asked for."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One way to go on from a prompt."""

    tokens: list[int]
    """The prompt's and its own, the end token included."""
    logprobs: list[dict[int, Logprob]]
    """One entry a token of its own: that token and the most likely ones by id."""
    cum_logprob: float
    """Sum over its own tokens; no length penalty."""
    text: str | None
    """What all of `tokens` say; None without a tokenizer."""
    finish_reason: str
    """stop or length."""


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """One prompt's sequences, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """What `LLM.encode` gives."""

    data: Vectors
    """float32: (width,), or (tokens, width) for the task token_embed."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """What `LLM.embed` gives."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers there are."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """What `LLM.classify` gives."""

    probs: list[float]
    """One for each of the model's labels."""

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """What `LLM.score` gives."""

    score: float
    """More is more alike, or a better answer."""


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[OutputData]):
    """One input with what was made of it."""

    request_id: str
    outputs: OutputData
    prompt_token_ids: list[int]
    """Special tokens included; both texts of a pair."""
    num_cached_tokens: int
    """Of them, found in the prefix cache."""
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Of `LLM.embed`."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Of `LLM.classify`."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Of `LLM.score`."""


def beam_output(prompt: Prompt, beams: list[Beam], tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """A finished search in the users' form."""
    sequences = []
    for beam in beams:
        tokens = [*prompt.token_ids, *beam.tokens]
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                logprobs=[_by_id(position) for position in beam.positions],
                cum_logprob=beam.logprob,
                text=None if tokenizer is None else tokenizer.decode(tokens, False),
                finish_reason="stop" if beam.is_finished else "length",
            )
        )
    return BeamSearchOutput(sequences)


def request_output(
    request_id: str,
    prompt: Prompt,
    outputs: list[Output],
    prompt_logprobs: list[PositionLogprobs | None] | None,
) -> RequestOutput:
    """A finished request in the users' form."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        prompt_logprobs=None
        if prompt_logprobs is None
        else [None if entry is None else _by_id(entry) for entry in prompt_logprobs],
        outputs=[_completion(place, output) for place, output in enumerate(outputs)],
        finished=True,
        num_cached_tokens=outputs[0].num_cached_tokens,
    )


def _completion(index: int, output: Output) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=output.text,
        token_ids=output.token_ids,
        cumulative_logprob=output.cumulative_logprob,
        logprobs=None if output.logprobs is None else [_by_id(entry) for entry in output.logprobs],
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )


def _by_id(position: PositionLogprobs) -> dict[int, Logprob]:
    entries = (position.chosen, *position.top)
    return {
        # The chosen token comes first, and its rank holds wherever it stands among the likely ones.
        entry.token_id: Logprob(entry.logprob, entry.rank, entry.token)
        for entry in reversed(entries)
    }
