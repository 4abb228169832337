"""DeviceLaunches: launches of a vision tower on a device that compiles each shape. Each launch size
may be captured as a graph."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpu.backends.base import Backend, Event, Graph
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.multimodal.base import Integers, Shapes
from hpu.multimodal.encoder_cache import EncoderCache


class LaunchOptions(NamedTuple):
    """Options shared by the launches of all kinds of images."""

    cache: EncoderCache
    backend: Backend
    multiplier: float = 1
    """Factor applied to all embeddings."""
    captures: bool = False
    """Whether each launch size is captured as a graph."""
    group: ProcessGroup = SINGLE
    """Ranks that divide the images; every rank writes all embeddings. All ranks run the same
    launches on different inputs."""


class DeviceLaunches:
    """Runs `features` on inputs of fixed shapes and writes the result to rows of the cache, without
    waiting for the results."""

    def __init__(
        self,
        features: Callable[..., Tensor],
        shapes: Callable[[int], Shapes],
        options: LaunchOptions,
    ) -> None:
        """`features`: maps the inputs of a launch size to (rows, hidden). `shapes`: input shapes of
        a launch size."""
        cache, backend, multiplier, self._captures, group = options
        self._shapes = shapes
        self._cache = cache
        self._backend = backend
        self._group = group
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        self._graphs: dict[int, Graph] = {}
        self._hosts: list[Tensor] = []
        self._in_flight: list[tuple[Event, list[Tensor]]] = []
        """Host tensors that the device may still read, with the event after which it has read
        them."""

        def scaled(*inputs: Tensor) -> Tensor:
            found = features(*inputs)
            return group.all_gather(found if multiplier == 1 else found * multiplier, dim=0)

        def write(embeddings: Tensor, rows: Tensor) -> None:
            cache.write(rows, embeddings)

        self._features = scaled
        self._run = backend.compiled(scaled)
        self._write = backend.compiled(write)

    def warm_up(self, size: int, on_capture: Callable[[int], None]) -> int:
        """Run a launch size, and capture it if launches are captured. Returns its rows per rank.
        `on_capture` receives the bytes of the graph."""
        inputs = self._inputs_of(size)
        num_rows = len(self._run(*inputs))
        if self._captures:
            self._capture(size, inputs, on_capture)
        self.launch(size, (), np.full(num_rows, self._cache.pad_row))
        return num_rows // self._group.size

    def launch(self, size: int, given: tuple[Tensor, ...], rows: Integers) -> None:
        """Encode the host tensors `given`, with the shapes of `size`, and write the embeddings to
        `rows`, which are the rows of all ranks in rank order. Without `given` the launch runs
        on the inputs of the previous launch of `size` (at first zeros), as padding."""
        inputs = self._inputs_of(size)
        for device, source in zip(inputs, given, strict=False):
            host = self._backend.host_tensor(device.numel(), device.dtype)
            host.copy_(source.reshape(-1))
            self._hosts.append(host)
            self._backend.upload(device, host.view(device.shape))
        graph = self._graphs.get(size)
        embeddings = self._run(*inputs) if graph is None else graph.replay(*inputs)
        self.write(embeddings, rows)

    def write(self, embeddings: Tensor, rows: Integers) -> None:
        """Write embeddings to `rows` of the cache."""
        host = self._backend.host_tensor(len(rows), self._backend.index_dtype)
        host.copy_(torch.from_numpy(rows))
        self._hosts.append(host)
        self._write(embeddings, *self._backend.device_copies(host))

    def end(self) -> None:
        """Keep the host tensors of a plan's launches until the device has read them. Called after
        the last launch of the plan."""
        self._in_flight = [launch for launch in self._in_flight if not launch[0].done()]
        self._in_flight.append((self._backend.event(), self._hosts))
        self._hosts = []

    def _inputs_of(self, size: int) -> tuple[Tensor, ...]:
        inputs = self._inputs.get(size)
        if inputs is None:
            index = self._backend.index_dtype
            inputs = tuple(
                self._backend.zeros(shape, index if dtype is None else dtype)
                for shape, dtype in self._shapes(size)
            )
            self._inputs[size] = inputs
        return inputs

    def _capture(
        self, size: int, inputs: tuple[Tensor, ...], on_capture: Callable[[int], None]
    ) -> None:
        """Capture a graph of `size`. The size runs without a graph if memory is too small or
        compilation fails."""
        backend = self._backend
        free = backend.memory()[0]
        try:
            graph = backend.capture(self._features, inputs)
        except (RuntimeError, MemoryError) as error:
            if not (backend.is_out_of_memory(error) or backend.is_compile_failure(error)):
                raise
            return
        self._graphs[size] = graph
        on_capture(max(0, free - backend.memory()[0]))
