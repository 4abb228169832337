"""Static inputs of buckets."""

import pytest
import torch
from card_memory import CardMemory, RebindingMemory

from hpu.backends.cpu import CpuBackend
from hpu.launch_inputs import (
    Array,
    DecodeArrays,
    DraftArrays,
    Field,
    LaunchArrays,
    LaunchFeature,
    PrefillArrays,
    declared,
)
from hpu.layers.metadata import DecodeAttentionInputs, FeatureInputs, PrefillAttentionInputs
from hpu.lora.context import LoRASlotInputs
from hpu.protocol import DECODE, PREFILL, Bucket
from hpu.runner.input_buffers import (
    MAX_DYNAMIC,
    DecodeLayout,
    InputBufferPool,
    InputLayout,
    LaunchInputs,
    PrefillLayout,
)
from hpu.spec_decode.device import DraftInputs
from hpu.spec_decode.draft_buffers import DraftBuffers, DraftLayout

BOTH = pytest.mark.parametrize("kind", [CpuBackend, CardMemory])


class Everything(LaunchFeature):
    """Declares every input of FeatureInputs that a feature may fill."""

    def fields(self, phase: int) -> tuple[Field, ...]:
        slots = Field("lora_slots", "B", pad=-1)
        cross = Field("cross_tiles", "B 5"), Field("cross_spans", "2 B Q")
        if phase == DECODE:
            return slots, Field("rope_positions", "B 1"), *cross
        rows, ids = Field("image_rows", "B Q"), Field("image_ids", "B Q")
        return slots, rows, ids, Field("rope_positions", "3 B Q"), *cross


def layouts() -> dict[int, InputLayout[LaunchArrays]]:
    return {PREFILL: PrefillLayout(), DECODE: DecodeLayout()}


def make(bucket: Bucket, backend: CpuBackend, *, is_static: bool = True) -> LaunchInputs:
    return layouts()[bucket[0]].buffers(bucket, backend, is_static=is_static)


def numbered(arrays: LaunchArrays) -> list[Array]:
    """The arrays in the order of the upload, after a different number is written to each."""
    *own, features = arrays
    found = [*own, *features.values()]
    for number, array in enumerate(found):
        array[:] = number
    return found


@BOTH
def test_prefill_inputs_are_in_the_attention_context(kind: type[CpuBackend]) -> None:
    layout = PrefillLayout([Everything()])
    inputs = layout.buffers((PREFILL, 2, 3, 4), kind(num_threads=1), is_static=True)

    numbered(inputs.host_arrays())
    inputs.upload()

    context = inputs.context
    assert isinstance(context, PrefillAttentionInputs)
    *own, features = context
    last = inputs.uploaded["last_token_indices"]
    sent = [inputs.tokens, *own, last, inputs.req_indices, *features]
    assert [tensor.unique().tolist() for tensor in sent] == [[i] for i in range(15)]
    assert [tuple(tensor.shape) for tensor in sent] == [
        (2, 3),
        (2, 3),
        (6,),
        (2,),
        (2,),
        (8,),
        (2,),
        (2,),
        (2,),
        (2,),
        (2, 3),
        (2, 3),
        (3, 2, 3),
        (2, 5),
        (2, 2, 3),
    ]


@BOTH
def test_decode_inputs_are_in_the_attention_context(kind: type[CpuBackend]) -> None:
    layout = DecodeLayout([Everything()])
    inputs = layout.buffers((DECODE, 2, 1, 5), kind(num_threads=1), is_static=True)

    numbered(inputs.host_arrays())
    inputs.upload()

    context = inputs.context
    assert isinstance(context, DecodeAttentionInputs)
    *own, features = context
    assert features.image_rows is features.image_ids is None
    sent = [inputs.req_indices, *own, features.lora_slots, *features[4:]]
    assert [tensor.unique().tolist() for tensor in sent] == [[i] for i in range(11)]
    assert [tuple(tensor.shape) for tensor in sent[7:]] == [(2,), (2, 1), (2, 5), (2, 2, 1)]
    assert context.positions.shape == inputs.tokens.shape == (2, 1)
    assert features.state_indices is inputs.req_indices


@BOTH
def test_a_model_without_features_gets_only_its_request_indices(kind: type[CpuBackend]) -> None:
    for bucket in ((PREFILL, 2, 3, 4), (DECODE, 2, 1, 5)):
        inputs = make(bucket, kind(num_threads=1))
        features = inputs.context.features
        indices = inputs.uploaded["req_indices" if bucket[0] == DECODE else "state_indices"]

        assert features == FeatureInputs(indices) and features.state_indices is indices
        assert inputs.host_arrays().features == {}


def test_inputs_of_drafts_are_uploaded_and_the_model_reads_rows_of_the_device() -> None:
    layout = DraftLayout(3, 2, [LoRASlotInputs(4)])
    inputs = layout.buffers((DECODE, 2, 1, 5), CardMemory(num_threads=1), is_static=True)

    numbered(inputs.host_arrays())
    inputs.upload()

    assert isinstance(inputs, DraftBuffers)
    sent = inputs.draft_inputs
    assert [tensor.unique().tolist() for tensor in sent] == [[i] for i in range(len(sent))]
    assert (sent.windows.shape, sent.pad_slots.shape) == ((2, 2), (6,))
    assert inputs.uploaded["lora_slots"].unique().tolist() == [len(sent)]
    assert inputs.graph_inputs is inputs.capture_inputs()
    assert all(tensor.shape[0] in (6, 15) for tensor in inputs.graph_inputs)
    assert inputs.tokens is inputs.graph_inputs[0]


@pytest.mark.parametrize("arrays", [PrefillArrays, DecodeArrays, DraftArrays])
def test_every_host_array_declares_its_shape(arrays: type) -> None:
    names = [field.name for field in declared(arrays)]

    assert [*names, "features"] == list(arrays.__annotations__)


def test_the_inputs_of_drafts_have_the_same_names_on_host_and_device() -> None:
    assert tuple(field.name for field in declared(DraftArrays)) == DraftInputs._fields


def test_a_warm_up_fills_the_inputs_of_a_feature_with_padding() -> None:
    feature = Everything()
    inputs = PrefillLayout([feature]).buffers((PREFILL, 2, 3, 4), CardMemory(1), is_static=False)
    arrays = inputs.host_arrays()
    numbered(arrays)

    feature.fill_dummy(arrays)

    found = {name: array.flat[0] for name, array in arrays.features.items()}
    assert found.pop("lora_slots") == -1
    assert set(found.values()) == {0}


def test_the_next_write_uses_another_set_than_a_running_launch() -> None:
    inputs = make((PREFILL, 1, 1, 0), CardMemory(num_threads=1))
    first = inputs.host_arrays()
    inputs.upload()

    second = inputs.host_arrays()
    inputs.upload()

    assert second is not first
    assert inputs.host_arrays() is first


def test_device_tensors_of_a_running_launch_are_not_overwritten_with_rebinding_graphs() -> None:
    inputs = make((DECODE, 1, 1, 2), RebindingMemory(num_threads=1))
    flats, contexts = [], []

    for step in range(4):
        for array in inputs.host_arrays()[:-1]:
            array[:] = step
        inputs.upload()
        flats.append(inputs.graph_inputs[0])
        contexts.append(inputs.context)

    assert flats[0] is flats[2] is not flats[1] and flats[1] is flats[3]
    assert [flat.unique().tolist() for flat in flats[2:]] == [[2], [3]]
    assert contexts[3] is contexts[1] and contexts[3].positions.tolist() == [[3]]
    # Tensors written on the device are the same in each launch.
    assert all(inputs.tokens is inputs.graph_inputs[1] for _ in range(2))


@pytest.mark.parametrize("is_static", [False, True])
def test_the_sets_of_a_decode_alternate_and_a_prefill_has_two(is_static: bool) -> None:
    card = RebindingMemory(num_threads=1)

    def hosts(phase: int) -> list[int]:
        layout = PrefillLayout() if phase == PREFILL else DecodeLayout(num_sets=6)
        inputs = layout.buffers((phase, 1, 1, 2), card, is_static=is_static)
        found = []
        for _ in range(12):
            found.append(inputs.host_arrays().positions.ctypes.data)
            inputs.upload()
        return found

    decodes, prefills = hosts(DECODE), hosts(PREFILL)

    assert len(set(decodes)) == 6 and decodes[:6] == decodes[6:]
    assert len(set(prefills)) == 2 and prefills[:2] == prefills[2:4]


def test_only_rebinding_graphs_are_captured_on_copies() -> None:
    bucket = (PREFILL, 1, 4, 2)
    moving = make(bucket, RebindingMemory(num_threads=1))
    fixed = make(bucket, CardMemory(num_threads=1))

    copies = [inputs.capture_inputs()[0].data_ptr() for inputs in (moving, fixed)]

    assert copies[0] not in {moving.graph_inputs[0].data_ptr(), moving.tokens.data_ptr()}
    assert copies[1] == fixed.graph_inputs[0].data_ptr() == fixed.tokens.data_ptr()


@BOTH
def test_the_device_tensors_stay_in_place_from_launch_to_launch(kind: type[CpuBackend]) -> None:
    pool = InputBufferPool(kind(num_threads=1), layouts())
    pool.prepare((PREFILL, 1, 4, 2))

    places = set()
    for _ in range(3):
        inputs = pool.get((PREFILL, 1, 4, 2))
        inputs.host_arrays()
        inputs.upload()
        places.add(inputs.context[0].data_ptr())

    assert len(places) == 1
    assert pool.get((PREFILL, 1, 4, 2)).is_static


def test_inputs_of_unprepared_shapes_are_dropped_and_prepared_inputs_are_kept() -> None:
    pool = InputBufferPool(CpuBackend(num_threads=1), layouts())
    pool.prepare((PREFILL, 1, 4, 2))
    kept = pool.get((PREFILL, 1, 4, 2))
    dropped = pool.get((DECODE, 1, 1, 1))

    for blocks in range(2, MAX_DYNAMIC + 2):
        pool.get((DECODE, 1, 1, blocks))

    assert pool.get((PREFILL, 1, 4, 2)) is kept
    assert pool.get((DECODE, 1, 1, 1)) is not dropped
    assert not dropped.is_static
    assert dropped.tokens.dtype == torch.int64
