"""GraphCache: one captured forward pass a bucket, replayed on whatever lies in the bucket's inputs.
Knows no rows and decides no order (see hpu/warmup/warmup.py)."""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hpu.backends.base import Backend, Graph
from hpu.layers.metadata import AttentionInputs
from hpu.profiling.counters import Counters, phase_name
from hpu.runner.input_buffers import Bucket, Inputs

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, AttentionInputs], Tensor]


class GraphCache:
    """Runs `forward` in a bucket: its graph if it has one, else the function itself.

    With `captures` off nothing is ever captured. Only inputs that are kept for good may be handed
    to `capture`: a graph keeps reading them.
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
        """warmup or serving: what a compilation counts as."""
        self.on_demand = False
        """Whether a bucket without a graph gets one when it runs, while `budget_bytes` last: for
        a server that was not warmed up."""
        self.captures = captures
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self._forward = forward
        self._backend = backend
        self._counters = counters
        self._watches = captures or backend.compiles
        self._graphs: dict[Bucket, Graph] = {}
        self._seen: set[Bucket] = set()
        """Buckets that have run; bounded by the shapes that the engine's table makes."""

    def holds(self, bucket: Bucket) -> bool:
        """Whether the bucket has a graph."""
        return bucket in self._graphs

    def run(self, inputs: Inputs[Any], rows: Sequence[int] = ()) -> Tensor:
        """Hidden states (B, Q, hidden) of the uploaded inputs; the next run may overwrite them.
        `rows` are those of the launch, for the log."""
        graph = self._graphs.get(inputs.bucket)
        if graph is not None:
            hidden: Tensor = graph.replay()
            return hidden
        if self._watches and inputs.bucket not in self._seen:
            return self._run_first(inputs, rows)
        _, batch, query, _ = inputs.bucket
        self._backend.expect(batch * query, batch)
        return self._forward(inputs.tokens, inputs.context)

    def capture(self, inputs: Inputs[Any]) -> int | None:
        """Make the bucket's graph. Bytes that it took, or None when memory is full: then all is as
        it was before."""
        free, _ = self._backend.memory()
        start = time.perf_counter()
        graph = self._capture(inputs)
        if graph is None:
            # What was captured until then is held by no one any more.
            gc.collect()
            self._backend.synchronize()
            return None
        taken = max(0, free - self._backend.memory()[0])
        self._graphs[inputs.bucket] = graph
        self._seen.add(inputs.bucket)
        self.bytes += taken
        self._count(inputs.bucket, time.perf_counter() - start)
        self._counters.add("graphs", 1)
        self._counters.add("graph_bytes", taken)
        return taken

    def _capture(self, inputs: Inputs[Any]) -> Graph | None:
        try:
            graph = self._backend.capture(self._forward, (inputs.tokens, inputs.context))
            self._backend.synchronize()
        except (RuntimeError, MemoryError) as error:
            if not self._backend.is_out_of_memory(error):
                raise
            return None
        return graph

    def _run_first(self, inputs: Inputs[Any], rows: Sequence[int]) -> Tensor:
        """A bucket that has never run before, and has no graph."""
        self._seen.add(inputs.bucket)
        if self.stage == "serving":
            self._warn(inputs.bucket, rows)
        may_capture = self.captures and self.on_demand and inputs.is_static
        if may_capture and self.bytes < self.budget_bytes:
            if self.capture(inputs) is not None:
                return self.run(inputs)
            self.on_demand = False
            logger.warning("No memory is left for graphs: further buckets run without one")
        start = time.perf_counter()
        hidden = self._forward(inputs.tokens, inputs.context)
        # Where nothing is captured, the runtime's own count is told instead
        # (hpu/profiling/diagnostics.py).
        if self.stage == "serving" and self.captures:
            self._count(inputs.bucket, time.perf_counter() - start)
        return hidden

    def _count(self, bucket: Bucket, seconds: float) -> None:
        self._counters.add(f"compilations.{phase_name(bucket[0])}.{self.stage}", 1)
        self._counters.add(f"compile_seconds.{self.stage}", seconds)

    def _warn(self, bucket: Bucket, rows: Sequence[int]) -> None:
        phase, batch, query, blocks = bucket
        logger.warning(
            "Compiled while serving: %s bucket of batch %d, query %d, %d blocks, for %s",
            phase_name(phase),
            batch,
            query,
            blocks,
            f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows))}" if rows else "no row",
        )
