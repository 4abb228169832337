"""The public face: `from gaudiserve import LLM, SamplingParams`. Holds nothing else."""

from importlib.metadata import PackageNotFoundError, version

from config.sampling import SamplingParams
from server.llm import LLM
from server.results import CompletionOutput, Logprob, RequestOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

try:
    __version__ = version("gaudiserve")
except PackageNotFoundError:  # run from the source tree, never installed
    __version__ = "0+source"

if __name__ == "__main__":
    from server.cli import main

    raise SystemExit(main())
