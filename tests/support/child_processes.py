"""Child processes of tests, forked from a process that has imported the models and the emulator: a
spawned process would import torch again, which takes seconds."""

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = [
    "hpu.emulator.install",
    "hpu.model_loader.loader",
    "hpu.models.transformers_fallback",
]


def child_context() -> ForkServerContext:
    """The context shared by all tests, so that the forking process is started once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
