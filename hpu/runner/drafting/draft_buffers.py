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


class DraftBuffers(InputBuffers):
    """Inputs of a decode with `width` rows a request. What the model reads (`graph_inputs`) are
    tensors of the device alone; `draft_inputs` are uploaded."""

    def __init__(
        self, bucket: Bucket, backend: Backend, *, is_static: bool, width: int, window: int
    ) -> None:
        _, batch, _, blocks = bucket
        self._width = width
        shapes: list[tuple[int, ...]] = [(batch,)] * 5
        shapes += [(batch, window), (blocks,), (blocks,), (blocks,), (batch * width,)]
        super().__init__(bucket, backend, is_static=is_static, shapes=shapes, make=DraftArrays)

    @property
    def draft_inputs(self) -> DraftInputs:
        """Device tensors of the last upload."""
        return DraftInputs(*self._current.tensors.rest)

    @property
    def graph_inputs(self) -> tuple[Tensor, ...]:
        return self._own

    def capture_inputs(self) -> tuple[Tensor, ...]:
        return self._own

    def set_rows(self, rows: Rows) -> None:
        """Copy the launch's rows to where the model reads them."""
        for own, new in zip(self._own, rows, strict=False):
            own.copy_(new)

    def split(self, *tensors: Tensor) -> LaunchTensors:
        own = tensors[-7:]
        context = DecodeAttentionInputs(*own[1:])
        rest: tuple[Tensor, ...] = ()
        if len(tensors) > len(own):
            rest = super().split(tensors[0], *own).rest
        return LaunchTensors(own[0], context, rest)

    def _own_tensors(self) -> tuple[Tensor, ...]:
        _, batch, _, blocks = self.bucket
        rows, entries = batch * self._width, blocks * self._width
        shapes = [(rows, 1), (rows, 1), (rows,), *[(entries,)] * 4]
        return tuple(self._backend.zeros(shape, self._backend.index_dtype) for shape in shapes)

    def _name(self, views: list[Tensor], *own: Tensor) -> LaunchTensors:
        return LaunchTensors(own[0], DecodeAttentionInputs(*own[1:]), tuple(views))
