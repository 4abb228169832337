"""DraftBuffers: input buffers of a decode whose rows are computed on the device."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hpu.backends.base import Backend
from hpu.launch_inputs import (
    DecodeArrays,
    DraftArrays,
    Field,
    LaunchFeature,
    declared,
)
from hpu.layers.metadata import DecodeAttentionInputs, FeatureInputs
from hpu.protocol import DECODE, Bucket
from hpu.runner.batch_state import BatchState
from hpu.runner.input_buffers import CacheLayout, HiddenBuffers, InputBuffers, LaunchTensors
from hpu.sampling.draft_rows import NO_TOKEN
from hpu.spec_decode.device import DraftInputs, VerifyBatch


class SampledTokenInputs(LaunchFeature):
    """Newest tokens of each request, for a pipeline stage that does not sample them."""

    def __init__(self, batch_state: BatchState, width: int) -> None:
        """`width`: number of tokens; see SampledTokens."""
        self._batch_state = batch_state
        self._width = width

    def fields(self, phase: int) -> tuple[Field, ...]:
        if phase != DECODE:
            return ()
        return Field("num_tokens", "B", pad=1), Field("last_tokens", f"B {self._width}")

    def fill_decode(self, rows: list[int], arrays: DecodeArrays | DraftArrays) -> None:
        self.clear(arrays)
        num_tokens, last_tokens = self._batch_state.last_tokens(rows, self._width)
        arrays.features["num_tokens"][: len(rows)] = num_tokens
        arrays.features["last_tokens"][: len(rows)] = last_tokens


class PlannedDraftInputs(LaunchFeature):
    """Drafts to verify, if the plan contains them."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self.drafts: Mapping[int, Sequence[int]] = {}
        """Drafts of the plan's decodes, by request index."""

    def fields(self, phase: int) -> tuple[Field, ...]:
        if phase != DECODE:
            return ()
        return (Field("drafts", f"B {self._max_drafts}", pad=NO_TOKEN),)

    def fill_decode(self, rows: list[int], arrays: DecodeArrays | DraftArrays) -> None:
        self.clear(arrays)
        for row, req_index in zip(arrays.features["drafts"], rows, strict=False):
            tokens = self.drafts[req_index]
            row[: len(tokens)] = tokens


class DraftLayout(CacheLayout[DraftArrays]):
    """Inputs of a decode with `width` rows per request. The model's inputs are written on the
    device (`DraftBuffers.set_rows`)."""

    feeds_model = False

    def __init__(
        self,
        width: int,
        window: int,
        features: Sequence[LaunchFeature] = (),
        *,
        hidden_buffers: HiddenBuffers | None = None,
    ) -> None:
        """`window`: number of blocks that can contain a request's next tokens."""
        further = [field for feature in features for field in feature.fields(DECODE)]
        super().__init__(DraftArrays, declared(DraftArrays), further, hidden_buffers)
        self.width = width
        self._window = window
        self.repeated = tuple(name for name in self.feature_names if name in FeatureInputs._fields)
        """Names of the features that have an entry per request and that the model reads for each
        row."""

    def axes(self, bucket: Bucket) -> Mapping[str, int]:
        _, batch, _, blocks = bucket
        return {"B": batch, "N": blocks, "W": self._window, "R": batch * self.width}

    def own_tensors(
        self, bucket: Bucket, backend: Backend, *, is_static: bool
    ) -> tuple[Tensor, ...]:
        phase, batch, query, blocks = bucket
        rows, entries = batch * self.width, blocks * self.width
        received = super().own_tensors((phase, rows, query, blocks), backend, is_static=is_static)
        shapes = [(rows, 1), (rows, 1), (rows,), *[(entries,)] * 4, *[(rows,)] * len(self.repeated)]
        own = [backend.zeros(shape, backend.index_dtype) for shape in shapes[len(received) :]]
        return (*received, *own)

    def tensors(self, uploaded: Mapping[str, Tensor], *own: Tensor) -> LaunchTensors:
        features = FeatureInputs(**dict(zip(self.repeated, own[7:], strict=True)))
        return LaunchTensors(own[0], DecodeAttentionInputs.of(own[1:7], features))

    def buffers(self, bucket: Bucket, backend: Backend, *, is_static: bool) -> "DraftBuffers":
        return DraftBuffers(bucket, self, backend, is_static=is_static)


class DraftBuffers(InputBuffers[DraftArrays]):
    """Input buffers of a decode with several rows per request."""

    def __init__(
        self, bucket: Bucket, layout: DraftLayout, backend: Backend, *, is_static: bool
    ) -> None:
        super().__init__(bucket, layout, backend, is_static=is_static)
        self._drafts = layout

    @property
    def draft_inputs(self) -> DraftInputs:
        """Device tensors of the last upload."""
        return DraftInputs(*(self.uploaded[name] for name in DraftInputs._fields))

    def set_rows(self, rows: VerifyBatch) -> None:
        """Copy the launch's rows to the model's input tensors. Tokens are skipped on a pipeline
        stage that receives hidden states."""
        first = 0 if self._drafts.hidden_buffers is None else 1
        for own, new in zip(self._own[first:7], rows[first:], strict=False):
            own.copy_(new)
        for own, name in zip(self._own[7:], self._drafts.repeated, strict=True):
            own.copy_(self.uploaded[name].repeat(self._drafts.width))
