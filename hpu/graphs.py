"""Graphs: one captured forward pass a bucket, within a budget of memory. Knows no rows."""

import logging
import time
from collections.abc import Callable

from torch import Tensor

from hpu.backends.base import Backend, Graph
from hpu.counters import Counters, phase_name
from hpu.layers.context import LaunchContext
from hpu.staging import Bucket, BucketInputs

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, LaunchContext], Tensor]


class Graphs:
    """Runs `forward` in a bucket, captured where the back end gains by it.

    A bucket is captured the first time it runs while `budget_bytes` last; beyond the budget, or
    with `captures` off, the function itself runs. Only prepared buckets should be handed to a
    capturing instance: a graph keeps reading the inputs it was captured with.
    """

    def __init__(
        self,
        forward: Forward,
        backend: Backend,
        counters: Counters,
        *,
        captures: bool,
        budget_bytes: int,
    ) -> None:
        self.stage = "warmup"
        """warmup or serving: what a capture counts as."""
        self.bytes = 0
        self._forward = forward
        self._backend = backend
        self._counters = counters
        self._captures = captures
        self._budget_bytes = budget_bytes
        self._graphs: dict[Bucket, Graph] = {}

    def run(self, inputs: BucketInputs) -> Tensor:
        """Hidden states (B, Q, hidden) of the uploaded inputs; the next run may overwrite them."""
        if not self._captures:
            return self._forward(inputs.tokens, inputs.context)
        graph = self._graphs.get(inputs.bucket)
        if graph is None:
            if not inputs.is_static or self.bytes >= self._budget_bytes:
                return self._forward(inputs.tokens, inputs.context)
            graph = self._capture(inputs)
        hidden: Tensor = graph.replay()
        return hidden

    def _capture(self, inputs: BucketInputs) -> Graph:
        free, _ = self._backend.memory()
        start = time.perf_counter()
        graph = self._backend.capture(self._forward, (inputs.tokens, inputs.context))
        seconds = time.perf_counter() - start
        taken = max(0, free - self._backend.memory()[0])
        self._graphs[inputs.bucket] = graph
        self.bytes += taken
        phase = phase_name(inputs.bucket[0])
        self._counters.add(f"compilations.{phase}.{self.stage}", 1)
        self._counters.add(f"compile_seconds.{self.stage}", seconds)
        self._counters.add("graphs", 1)
        self._counters.add("graph_bytes", taken)
        if self.stage == "serving":
            logger.warning("captured %s bucket %s while serving", phase, inputs.bucket[1:])
        return graph
