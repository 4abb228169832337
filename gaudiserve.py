"""The public API: `from gaudiserve import LLM, SamplingParams`."""

if __name__ == "__main__":
    # Before the imports of the public API, which the command does not need.
    from server.cli.main import main

    raise SystemExit(main())

from config.params.beam_search import BeamSearchParams
from config.params.pooling import PoolingParams
from config.params.sampling import SamplingParams
from config.version import VERSION as __version__
from server.offline.llm import LLM
from server.offline.lora import LoRARequest
from server.offline.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "__version__",
]
