"""CapturedFunctions: graphs of functions other than the model's forward pass, within the memory
budget of GraphCache."""

import gc
import logging
from collections.abc import Callable, Hashable
from typing import Any

from hpu.backends.base import Backend, Graph
from hpu.distributed.agreement import Agreement
from hpu.protocol import Bucket
from hpu.runner.graph_cache import GraphCache

logger = logging.getLogger(__name__)


class CapturedFunctions:
    """Graphs by key. A graph is captured at the first launch that needs it, during warm-up or if
    `graphs` captures on demand, and only if the model's bucket has a graph."""

    def __init__(
        self, backend: Backend, graphs: GraphCache, agreement: Agreement, what: str
    ) -> None:
        """`agreement`: agreement of the ranks that run the functions. `what`: description of the
        functions in log lines."""
        self._agreement = agreement
        self.backend = backend
        self._graphs = graphs
        self._what = what
        self._captured: dict[Hashable, Graph | None] = {}
        """Graph by key; None if any rank has no graph."""
        self._is_full = False
        """Whether a capture ran out of device memory on any rank."""

    def find(
        self,
        key: Hashable,
        bucket: Bucket,
        function: Callable[..., Any],
        inputs: Callable[[], tuple[Any, ...]],
        *,
        frees_intermediates: bool = False,
    ) -> Graph | None:
        """Graph for `key`, capturing `function` with `inputs()` on first use; None if the function
        must run without a graph."""
        if not self._graphs.has_graph(bucket):
            return None
        if key not in self._captured and self._may_capture():
            self._capture(key, function, inputs(), frees_intermediates=frees_intermediates)
        return self._captured.get(key)

    def _may_capture(self) -> bool:
        graphs = self._graphs
        is_time = graphs.stage == "warmup" or graphs.on_demand
        return is_time and not self._is_full and graphs.bytes < graphs.budget_bytes

    def _capture(
        self,
        key: Hashable,
        function: Callable[..., Any],
        inputs: tuple[Any, ...],
        *,
        frees_intermediates: bool,
    ) -> None:
        free, _ = self.backend.memory()
        graph: Graph | None = None
        is_full = False
        try:
            graph = self.backend.capture_function(
                function, inputs, frees_intermediates=frees_intermediates
            )
            self.backend.synchronize()
        except (RuntimeError, MemoryError) as error:
            if self.backend.is_compile_failure(error):
                logger.warning("%s runs without a graph for %s: %s", self._what, key, error)
            elif self.backend.is_out_of_memory(error):
                is_full = True
                logger.warning(
                    "No memory is left for graphs of %s: no more graphs are captured", self._what
                )
            else:
                raise
            graph = None
            # Free the memory of the failed capture.
            gc.collect()
            self.backend.synchronize()
        if not self._agreement.all_true(graph is not None):
            self._captured[key] = None
            # All ranks must go on with the same captures.
            self._is_full = not self._agreement.all_true(not is_full)
            return
        self._captured[key] = graph
        taken = max(0, free - self.backend.memory()[0])
        self._graphs.add_bytes(self._agreement.largest(taken))
