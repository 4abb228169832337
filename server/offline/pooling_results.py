"""What offline users of a pooling model get: the fields that vLLM's users know. Plain data."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from server.pooling.pipeline import Vectors

Data = TypeVar("Data")


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
class PoolingRequestOutput(Generic[Data]):
    """One input with what was made of it."""

    request_id: str
    outputs: Data
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
