"""GraphCache: runs the forward pass of each bucket. CapturingGraphCache: captures the forward pass,
and replays the graph on the bucket's input buffers."""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from hpu.backends.base import Backend, Graph
from hpu.distributed.agreement import ALONE, Agreement
from hpu.layers.metadata import AttentionInputs
from hpu.protocol import Bucket
from hpu.runner.counters import Counters, phase_name
from hpu.runner.input_buffers import AnyInputs
from hpu.runner.piecewise_forward import PiecewiseForward

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, AttentionInputs], Tensor]


def _forward_flat(forward: Forward, inputs: AnyInputs, *tensors: Tensor) -> Tensor:
    """Run `forward` on tensors shaped like `inputs.graph_inputs`. A module-level function, because
    a graph with a reference to its cache would live until the garbage collector runs."""
    split = inputs.split(*tensors)
    return forward(split.tokens, split.context)


class GraphCache:
    """Runs `forward` in a bucket. This base class captures no graphs."""

    def __init__(self, forward: Forward, backend: Backend, counters: Counters) -> None:
        self.stage = "warmup"
        """Label of compilations in the counters: warmup or serving."""
        self.on_demand = False
        """Whether to capture a bucket on its first run, within `budget_bytes`; for a server without
        warm-up."""
        self.budget_bytes = 0
        self.bytes = 0
        self.tracks_first_runs = backend.compiles
        """Whether the first run of a bucket compiles or captures it."""
        self._forward = forward
        self._backend = backend
        self._counters = counters
        self.uncompilable: set[Bucket] = set()
        """Buckets whose graph the compiler of any rank rejected; they run without a graph."""
        self._seen: set[Bucket] = set()
        """Buckets that have run or have a graph; limited by the shapes of the engine's bucket
        table."""

    def to_capture(self, buckets: list[Bucket]) -> list[Bucket]:
        """The buckets among `buckets` that a warm-up captures."""
        return []

    def has_graph(self, bucket: Bucket) -> bool:
        """Whether the bucket has a graph."""
        return False

    def run(self, inputs: AnyInputs, req_indices: Sequence[int] = ()) -> Tensor:
        """Hidden states (B, Q, hidden) of the uploaded inputs; the next run may overwrite them.
        `req_indices`: requests to name in log lines."""
        if self.tracks_first_runs and inputs.bucket not in self._seen:
            return self._run_first(inputs, req_indices)
        _, batch, query, _ = inputs.bucket
        self._backend.expect(batch * query, batch)
        return self._run_plain(inputs)

    def capture(self, inputs: AnyInputs) -> int | None:
        """Capture the bucket. Returns the bytes of its graph, or None if memory is full or the
        compiler rejects the graph, on any rank; then no rank keeps a graph."""
        raise AssertionError("no graphs are captured")

    def add_bytes(self, taken: int) -> None:
        """Add the bytes of a graph that another component has captured."""
        self.bytes += taken
        self._counters.add("graph_bytes", taken)

    def _run_plain(self, inputs: AnyInputs) -> Tensor:
        return self._forward(inputs.tokens, inputs.context)

    def _run_first(self, inputs: AnyInputs, req_indices: Sequence[int]) -> Tensor:
        self._seen.add(inputs.bucket)
        if self.stage == "serving":
            _warn(inputs.bucket, req_indices)
        # hpu/profiling/diagnostics.py counts the runtime's compilations.
        return self._run_plain(inputs)


class CapturingGraphCache(GraphCache):
    """Replays a bucket's graph, or calls `forward` if there is no graph.

    Only static inputs may be captured, because a graph may read the same tensors in every replay.
    """

    def __init__(
        self,
        forward: Forward,
        backend: Backend,
        counters: Counters,
        *,
        budget_bytes: int,
        runs_once: bool = False,
        agreement: Agreement = ALONE,
    ) -> None:
        """Create an empty cache.

        Args:
            agreement: agreement of the ranks, whose graphs contain the same collectives.
            runs_once: disables capture on demand, because a capture runs `forward` once more.
                Set if `forward` advances states or overwrites ring entries, or for a pipeline
                stage, whose capture would wait for a stage that waits for this launch.
        """
        super().__init__(forward, backend, counters)
        self.budget_bytes = budget_bytes
        self.tracks_first_runs = True
        self._runs_once = runs_once
        self._agreement = agreement
        self._graphs: dict[Bucket, Graph] = {}

    def to_capture(self, buckets: list[Bucket]) -> list[Bucket]:
        return buckets

    def has_graph(self, bucket: Bucket) -> bool:
        return bucket in self._graphs

    def run(self, inputs: AnyInputs, req_indices: Sequence[int] = ()) -> Tensor:
        graph = self._graphs.get(inputs.bucket)
        if graph is not None:
            hidden: Tensor = graph.replay(*inputs.graph_inputs)
            return hidden
        return super().run(inputs, req_indices)

    def capture(self, inputs: AnyInputs) -> int | None:
        free, _ = self._backend.memory()
        start = time.perf_counter()
        graph = self._capture(inputs)
        is_everywhere = self._agreement.all_true(graph is not None)
        if graph is None or not is_everywhere:
            graph = None
            # Free the memory of the failed capture.
            gc.collect()
            self._backend.synchronize()
            # All ranks must go on with the same captures.
            if not self._agreement.all_true(inputs.bucket not in self.uncompilable):
                self.uncompilable.add(inputs.bucket)
            return None
        taken = self._agreement.largest(max(0, free - self._backend.memory()[0]))
        self._graphs[inputs.bucket] = graph
        self._seen.add(inputs.bucket)
        self.add_bytes(taken)
        self._count(inputs.bucket, time.perf_counter() - start)
        self._counters.add("graphs", 1)
        return taken

    def _capture(self, inputs: AnyInputs) -> Graph | None:
        try:
            if isinstance(self._forward, PiecewiseForward):
                graph: Graph = self._forward.capture(inputs)
            else:
                function = partial(_forward_flat, self._forward, inputs)
                graph = self._backend.capture(function, inputs.capture_inputs())
            self._backend.synchronize()
        except (RuntimeError, MemoryError) as error:
            if self._backend.is_compile_failure(error):
                self.uncompilable.add(inputs.bucket)
                logger.warning("Bucket %s runs without a graph: %s", inputs.bucket, error)
            elif not self._backend.is_out_of_memory(error):
                raise
            return None
        return graph

    def _run_plain(self, inputs: AnyInputs) -> Tensor:
        """Run without a graph, but exactly the function that is captured, so that a lazy device
        compiles it only once."""
        return _forward_flat(self._forward, inputs, *inputs.graph_inputs)

    def _run_first(self, inputs: AnyInputs, req_indices: Sequence[int]) -> Tensor:
        """Run a bucket without a graph for the first time; may capture it."""
        if self.stage == "serving":
            _warn(inputs.bucket, req_indices)
        self._seen.add(inputs.bucket)
        may_capture = self.on_demand and inputs.is_static and not self._runs_once
        # Agree first: data-parallel engines that step together may have captured different
        # samplers.
        if may_capture and self._agreement.all_true(self.bytes < self.budget_bytes):
            if self.capture(inputs) is not None:
                return self.run(inputs)
            if inputs.bucket not in self.uncompilable:
                self.on_demand = False
                logger.warning("No memory is left for graphs: further buckets run without graphs")
        start = time.perf_counter()
        hidden = self._run_plain(inputs)
        if self.stage == "serving":
            self._count(inputs.bucket, time.perf_counter() - start)
        return hidden

    def _count(self, bucket: Bucket, seconds: float) -> None:
        self._counters.add(f"compilations.{phase_name(bucket[0])}.{self.stage}", 1)
        self._counters.add(f"compile_seconds.{self.stage}", seconds)


def _warn(bucket: Bucket, req_indices: Sequence[int]) -> None:
    phase, batch, query, blocks = bucket
    logger.warning(
        "Compiled while serving: %s bucket of batch %d, query %d, %d blocks, for %s",
        phase_name(phase),
        batch,
        query,
        blocks,
        f"requests {', '.join(map(str, req_indices))}" if req_indices else "no request",
    )
