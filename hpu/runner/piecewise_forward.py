"""Piecewise forward pass: each part starts with a layer whose weights are in host memory."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from hpu.backends.base import Backend, Graph
from hpu.layers.metadata import AttentionInputs
from hpu.offload.weight_streamer import WeightStreamer
from hpu.runner.input_buffers import InputBuffers

Part = Callable[[Tensor, AttentionInputs], Tensor]


class PartedModel(Protocol):
    """A model that can run a range of its layers."""

    def part(self, first: int, end: int, tokens: Tensor, inputs: AttentionInputs) -> Tensor: ...


def _first_flat(part: Part, inputs: InputBuffers[Any], *tensors: Tensor) -> Tensor:
    split = inputs.split(*tensors)
    return part(split.tokens, split.context)


def _next_flat(part: Part, inputs: InputBuffers[Any], hidden: Tensor, *tensors: Tensor) -> Tensor:
    return part(hidden, inputs.split(*tensors).context)


class PiecewiseForward:
    """Piecewise forward pass of a model. While a part runs, the weights of the next offloaded layer
    are copied to the device. Each part may be a graph; copies are started between parts."""

    def __init__(
        self, model: PartedModel, num_layers: int, ring: WeightStreamer, backend: Backend
    ) -> None:
        """`ring`: the offloaded layers, which must include the first layer."""
        self._ring = ring
        self._backend = backend
        ends = [*ring.indices[1:], num_layers]
        self._parts: list[Part] = [
            partial(model.part, first, end) for first, end in zip(ring.indices, ends, strict=True)
        ]

    def __call__(self, tokens: Tensor, inputs: AttentionInputs) -> Tensor:
        """Hidden states of `tokens`. See CausalLM.forward."""

        def compute(number: int, hidden: Tensor | None) -> Tensor:
            with self._backend.recipe:
                return self._parts[number](tokens if hidden is None else hidden, inputs)

        return self.run(compute)

    def run(self, compute: Callable[[int, Tensor | None], Tensor]) -> Tensor:
        """Call `compute` with each part's number and the previous part's output (None for the first
        part), while the weights of the next part are copied."""
        hidden = None
        for number in range(self._ring.size):
            self._ring.require(number)
            before = self._backend.event()
            hidden = compute(number, hidden)
            self._ring.begin((number + 1) % self._ring.size, before)
        assert hidden is not None, "at least one part"
        return hidden

    def capture(self, inputs: InputBuffers[Any]) -> "PartedGraph":
        """Capture a graph per part, for the shapes of `inputs`."""
        graphs: list[Graph] = []
        tensors = inputs.capture_inputs()

        def compute(number: int, hidden: Tensor | None) -> Tensor:
            part, given = self._parts[number], tensors
            function: Callable[..., Tensor] = partial(_first_flat, part, inputs)
            if hidden is not None:
                function, given = partial(_next_flat, part, inputs), (hidden, *tensors)
            graphs.append(self._backend.capture(function, given))
            found: Tensor = graphs[-1].replay(*given)
            return found

        self.run(compute)
        return PartedGraph(self, graphs)


class PartedGraph:
    """Graphs of all parts, which are replayed in order."""

    def __init__(self, forward: PiecewiseForward, graphs: Sequence[Graph]) -> None:
        self._forward = forward
        self._graphs = graphs

    def replay(self, *inputs: Any) -> Tensor:
        """See Graph.replay."""

        def compute(number: int, hidden: Tensor | None) -> Tensor:
            given = inputs if hidden is None else (hidden, *inputs)
            found: Tensor = self._graphs[number].replay(*given)
            return found

        return self._forward.run(compute)
