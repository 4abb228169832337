"""Child processes of tests, forked from a process that has imported the models and the emulator: a
spawned one imports torch anew, which takes seconds."""

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = [
    "hpu.emulator.install",
    "hpu.model_loader.loader",
    "hpu.models.transformers_fallback",
]


def child_context() -> ForkServerContext:
    """The one context of all tests: the process that forks is started once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
