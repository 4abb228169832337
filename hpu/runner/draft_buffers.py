"""DraftBuffers: input buffers of a decode whose rows the device computes."""

from typing import NamedTuple

from torch import Tensor

from hpu.backends.base import Backend
from hpu.layers.metadata import DecodeAttentionInputs
from hpu.protocol import Bucket
from hpu.runner.input_buffers import Array, InputBuffers, LaunchTensors
from hpu.spec_decode.device import DraftInputs, Rows


class DraftArrays(NamedTuple):
    """Host arrays of a decode, with the names and shapes of DraftInputs."""

    req_indices: Array
    limits: Array
    may_draft: Array
    lows: Array
    first_blocks: Array
    windows: Array
    block_list: Array
    block_groups: Array
    block_starts: Array
    pad_slots: Array
    lora_slots: Array | None = None
    """(B,): the slot of each request's adapter, where adapters are served."""


class DraftBuffers(InputBuffers):
    """Inputs of a decode with `width` rows a request. What the model reads (`graph_inputs`) are
    tensors of the device alone; `draft_inputs` are uploaded."""

    def __init__(
        self,
        bucket: Bucket,
        backend: Backend,
        *,
        is_static: bool,
        width: int,
        window: int,
        has_adapters: bool = False,
    ) -> None:
        """`window`: blocks of a request that its next tokens may lie in. `has_adapters`: rows name
        the slots of adapters."""
        _, batch, _, blocks = bucket
        self._width = width
        self._names_slots = has_adapters
        shapes: list[tuple[int, ...]] = [(batch,)] * 5
        shapes += [(batch, window), (blocks,), (blocks,), (blocks,), (batch * width,)]
        if has_adapters:
            shapes.append((batch,))
        super().__init__(bucket, backend, is_static=is_static, shapes=shapes, make=DraftArrays)

    @property
    def draft_inputs(self) -> DraftInputs:
        """Device tensors of the last upload."""
        return DraftInputs(*self._current.tensors.rest[: len(DraftInputs._fields)])

    @property
    def graph_inputs(self) -> tuple[Tensor, ...]:
        return self._own

    def capture_inputs(self) -> tuple[Tensor, ...]:
        return self._own

    def set_rows(self, rows: Rows) -> None:
        """Copy the launch's rows to where the model reads them."""
        for own, new in zip(self._own[:7], rows, strict=False):
            own.copy_(new)
        if self._names_slots:
            self._own[-1].copy_(self._current.tensors.rest[-1].repeat(self._width))

    def split(self, *tensors: Tensor) -> LaunchTensors:
        own = tensors[-len(self._own) :]
        rest: tuple[Tensor, ...] = ()
        if len(tensors) > len(own):
            rest = super().split(tensors[0], *own).rest
        return self._launch(own, rest)

    def _own_tensors(self) -> tuple[Tensor, ...]:
        _, batch, _, blocks = self.bucket
        rows, entries = batch * self._width, blocks * self._width
        shapes = [(rows, 1), (rows, 1), (rows,), *[(entries,)] * 4]
        if self._names_slots:
            shapes.append((rows,))
        return tuple(self._backend.zeros(shape, self._backend.index_dtype) for shape in shapes)

    def _name(self, views: list[Tensor], *own: Tensor) -> LaunchTensors:
        return self._launch(own, tuple(views))

    def _launch(self, own: tuple[Tensor, ...], rest: tuple[Tensor, ...]) -> LaunchTensors:
        slots = own[-1] if self._names_slots else None
        context = DecodeAttentionInputs(*own[1:7])._replace(lora_slots=slots)
        return LaunchTensors(own[0], context, rest)
