"""DraftBuffers: input buffers of a decode whose rows are computed on the device."""

from typing import NamedTuple

from torch import Tensor

from hpu.backends.base import Backend
from hpu.layers.metadata import DecodeAttentionInputs
from hpu.protocol import Bucket
from hpu.runner.input_buffers import Array, HiddenBuffers, InputBuffers, LaunchTensors
from hpu.spec_decode.device import DraftInputs, VerifyBatch


class DraftArrays(NamedTuple):
    """Host arrays of a decode; the fields without defaults have the names and shapes of
    DraftInputs."""

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
    num_tokens: Array | None = None
    """(B,): number of tokens of each request; only on pipeline stages before the last."""
    last_tokens: Array | None = None
    """(B, width): newest tokens of each request (see SampledTokens); only on pipeline stages before
    the last."""
    drafts: Array | None = None
    """(B, width - 1): drafts to verify, padded with NO_TOKEN, if the plan contains them."""
    lora_slots: Array | None = None
    """(B,): LoRA slot of each request, if adapters are served."""


class DraftBuffers(InputBuffers):
    """Input buffers of a decode with `width` rows per request. The model's inputs (`graph_inputs`)
    are written on the device; `draft_inputs` are uploaded."""

    def __init__(
        self,
        bucket: Bucket,
        backend: Backend,
        *,
        is_static: bool,
        width: int,
        window: int,
        has_adapters: bool = False,
        hidden_buffers: HiddenBuffers | None = None,
        learns: bool = False,
        plans_drafts: bool = False,
    ) -> None:
        """Allocate the buffers.

        Args:
            window: number of blocks that can contain a request's next tokens.
            has_adapters: whether rows have LoRA slots.
            hidden_buffers: see InputBuffers.
            learns: whether tokens sampled by another pipeline stage are uploaded.
            plans_drafts: whether drafts are uploaded.
        """
        _, batch, _, blocks = bucket
        self._width = width
        self._names_slots = has_adapters
        shapes: list[tuple[int, ...]] = [(batch,)] * 5
        shapes += [(batch, window), (blocks,), (blocks,), (blocks,), (batch * width,)]
        names = [*DraftInputs._fields]
        self._learns = learns
        if learns:
            shapes += [(batch,), (batch, width)]
            names += ["num_tokens", "last_tokens"]
        self._plans_drafts = plans_drafts
        if plans_drafts:
            shapes.append((batch, width - 1))
            names.append("drafts")
        if has_adapters:
            shapes.append((batch,))
            names.append("lora_slots")

        def make(*arrays: Array) -> DraftArrays:
            return DraftArrays(**dict(zip(names, arrays, strict=True)))

        super().__init__(
            bucket,
            backend,
            is_static=is_static,
            shapes=shapes,
            make=make,
            hidden_buffers=hidden_buffers,
        )

    @property
    def draft_inputs(self) -> DraftInputs:
        """Device tensors of the last upload."""
        return DraftInputs(*self._current.tensors.rest[: len(DraftInputs._fields)])

    @property
    def known(self) -> tuple[Tensor, ...] | None:
        """`num_tokens` and `last_tokens` of the last upload; None if they are not uploaded."""
        if not self._learns:
            return None
        first = len(DraftInputs._fields)
        return self._current.tensors.rest[first : first + 2]

    @property
    def planned_drafts(self) -> Tensor | None:
        """`drafts` of the last upload; None if they are not uploaded."""
        if not self._plans_drafts:
            return None
        return self._current.tensors.rest[len(DraftInputs._fields) + 2 * self._learns]

    @property
    def graph_inputs(self) -> tuple[Tensor, ...]:
        return self._own

    def capture_inputs(self) -> tuple[Tensor, ...]:
        return self._own

    def set_rows(self, rows: VerifyBatch) -> None:
        """Copy the launch's rows to the model's input tensors. Tokens are skipped on a pipeline
        stage that receives hidden states."""
        first = 0 if self._hidden_buffers is None else 1
        for own, new in zip(self._own[first:7], rows[first:], strict=False):
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
        own = [self._backend.zeros(shape, self._backend.index_dtype) for shape in shapes[1:]]
        if self._hidden_buffers is not None:
            return (self._hidden_buffers.get(rows, 1, is_static=self.is_static), *own)
        return (self._backend.zeros(shapes[0], self._backend.index_dtype), *own)

    def _name(self, views: list[Tensor], *own: Tensor) -> LaunchTensors:
        return self._launch(own, tuple(views))

    def _launch(self, own: tuple[Tensor, ...], rest: tuple[Tensor, ...]) -> LaunchTensors:
        slots = own[-1] if self._names_slots else None
        context = DecodeAttentionInputs(*own[1:7])._replace(lora_slots=slots)
        return LaunchTensors(own[0], context, rest)
