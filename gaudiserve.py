"""The public face: `from gaudiserve import LLM, SamplingParams`. Holds nothing else."""

from config.beams import BeamSearchParams
from config.sampling import SamplingParams
from config.version import VERSION as __version__
from server.llm import LLM
from server.results import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestOutput,
)

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

if __name__ == "__main__":
    from server.cli import main

    raise SystemExit(main())
