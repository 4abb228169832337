"""Return types of `LLM`, with the class names and fields of vLLM's offline API."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from server.generation.beam_search import Beam
from server.generation.logprobs import PositionLogprobs, PromptLogprobs
from server.generation.outputs import Output, Prompt
from server.pooling.pipeline import Vectors
from server.text.tokenizer import Tokenizer

OutputData = TypeVar("OutputData")


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token at a position."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """A choice of a completion."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    """Token id -> log-probability for each output token, with the chosen and the most likely
    tokens; None unless requested."""
    finish_reason: str | None
    """stop or length."""
    stop_reason: str | int | None
    """The stop string or stop_token_ids entry that ended the choice; None if something else
    did."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt with all its choices."""

    request_id: str
    prompt: str | None
    """Text of the prompt; None if only token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """Token id -> log-probability for each prompt token, None for the first token; None unless
    requested."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A continuation of a prompt."""

    tokens: list[int]
    """Prompt and output tokens, including the end token."""
    logprobs: list[dict[int, Logprob]]
    """Token id -> log-probability for each output token, with the chosen and the most likely
    tokens."""
    cum_logprob: float
    """Sum of the log-probabilities of the output tokens, without length penalty."""
    text: str | None
    """`tokens` decoded; None without a tokenizer."""
    finish_reason: str
    """stop or length."""


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """Sequences of a prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """Vectors, class probabilities or logits, or score of an input, from `LLM.encode`."""

    data: Vectors
    """float32 array (width,), or (tokens, width) for the task token_embed."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """Embedding of an input, from `LLM.embed`."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Width of the vector."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """Class probabilities or logits of an input, from `LLM.classify`."""

    probs: list[float]
    """Probability of each label of the model; the logit, if the result is not normalized."""

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Score of a text pair, from `LLM.score`."""

    score: float
    """Score; larger means more similar or more relevant."""


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[OutputData]):
    """An input of a pooling model and its output."""

    request_id: str
    outputs: OutputData
    prompt_token_ids: list[int]
    """Token ids of the input, including special tokens; for a pair, the ids of both texts."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Entry of the list that `LLM.embed` returns."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Entry of the list that `LLM.classify` returns."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Entry of the list that `LLM.score` returns."""


def beam_output(prompt: Prompt, beams: list[Beam], tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """Convert the beams of a finished search."""
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
    prompt_logprobs: PromptLogprobs | None,
    num_cached_tokens: int,
) -> RequestOutput:
    """Convert a finished request."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        prompt_logprobs=None
        if prompt_logprobs is None
        else [None if entry is None else _by_id(entry) for entry in prompt_logprobs],
        outputs=[_completion(index, output) for index, output in enumerate(outputs)],
        finished=True,
        num_cached_tokens=num_cached_tokens,
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
        # Reversed, so that the chosen token comes last and overwrites its entry in `top`.
        entry.token_id: Logprob(entry.logprob, entry.rank, entry.token)
        for entry in reversed(entries)
    }
