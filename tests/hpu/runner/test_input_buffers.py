"""Static inputs of buckets."""

import pytest
import torch

from hpu.backends.cpu import CpuBackend
from hpu.layers.metadata import DecodeAttentionInputs, PrefillAttentionInputs
from hpu.protocol import DECODE, PREFILL
from hpu.runner.input_buffers import (
    MAX_DYNAMIC,
    DecodeArrays,
    ImageFields,
    InputBufferPool,
    InputBuffers,
    PrefillArrays,
)


class Card(CpuBackend):
    """A back end that reports its own device memory."""

    shares_host_memory = False


BOTH = pytest.mark.parametrize("kind", [CpuBackend, Card])


@BOTH
def test_prefill_inputs_are_in_the_attention_context(kind: type[CpuBackend]) -> None:
    backend = kind(num_threads=1)
    inputs = InputBuffers(
        *((PREFILL, 2, 3, 4), backend),
        is_static=True,
        names_requests=True,
        has_adapters=True,
        image_fields=ImageFields(True, True, True, num_tiles=5),
    )
    arrays = inputs.host_arrays()
    assert isinstance(arrays, PrefillArrays)

    for number, field in enumerate(arrays):
        assert field is not None
        field[:] = number
    inputs.upload()

    context = inputs.context
    assert isinstance(context, PrefillAttentionInputs)
    assert inputs.last_token_indices is not None
    own, others = context[:5], context[5:]
    sent = [inputs.tokens, *own, inputs.last_token_indices, inputs.req_indices, *others]
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
    backend = kind(num_threads=1)
    inputs = InputBuffers((DECODE, 2, 1, 5), backend, is_static=True, names_requests=True)
    arrays = inputs.host_arrays()
    assert isinstance(arrays, DecodeArrays)
    assert arrays.lora_slots is None

    for number, field in enumerate(arrays[:7]):
        assert field is not None
        field[:] = number
    inputs.upload()

    context = inputs.context
    assert isinstance(context, DecodeAttentionInputs)
    assert context.positions.shape == (2, 1)
    *context, states, lora_slots, rope_positions, cross_tiles, cross_spans = context
    assert lora_slots is rope_positions is cross_tiles is cross_spans is None
    assert [t.unique().tolist() for t in [inputs.req_indices, *context]] == [[i] for i in range(7)]
    assert torch.equal(states, inputs.req_indices)
    assert inputs.tokens.shape == (2, 1)


def test_the_next_write_uses_another_set_than_a_running_launch() -> None:
    inputs = InputBuffers((PREFILL, 1, 1, 0), Card(num_threads=1), is_static=True)
    first = inputs.host_arrays()
    inputs.upload()

    second = inputs.host_arrays()
    inputs.upload()

    assert second is not first
    assert inputs.host_arrays() is first


class RebindingCard(Card):
    """A card whose replays may read tensors that their capture did not read."""

    rebinds_inputs = True


def test_device_tensors_of_a_running_launch_are_not_overwritten_with_rebinding_graphs() -> None:
    inputs = InputBuffers((DECODE, 1, 1, 2), RebindingCard(num_threads=1), is_static=True)
    flats, contexts = [], []

    for step in range(4):
        for field in inputs.host_arrays():
            if field is not None:
                field[:] = step
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
    card = RebindingCard(num_threads=1)

    def hosts(phase: int) -> list[int]:
        inputs = InputBuffers((phase, 1, 1, 2), card, is_static=is_static, decode_sets=6)
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
    moving = InputBuffers(bucket, RebindingCard(num_threads=1), is_static=True)
    fixed = InputBuffers(bucket, Card(num_threads=1), is_static=True)

    copies = [inputs.capture_inputs()[0].data_ptr() for inputs in (moving, fixed)]

    assert copies[0] not in {moving.graph_inputs[0].data_ptr(), moving.tokens.data_ptr()}
    assert copies[1] == fixed.graph_inputs[0].data_ptr() == fixed.tokens.data_ptr()


@BOTH
def test_the_device_tensors_stay_in_place_from_launch_to_launch(kind: type[CpuBackend]) -> None:
    pool = InputBufferPool(kind(num_threads=1), InputBuffers)
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
    pool = InputBufferPool(CpuBackend(num_threads=1), InputBuffers)
    pool.prepare((PREFILL, 1, 4, 2))
    kept = pool.get((PREFILL, 1, 4, 2))
    dropped = pool.get((DECODE, 1, 1, 1))

    for blocks in range(2, MAX_DYNAMIC + 2):
        pool.get((DECODE, 1, 1, blocks))

    assert pool.get((PREFILL, 1, 4, 2)) is kept
    assert pool.get((DECODE, 1, 1, 1)) is not dropped
    assert not dropped.is_static
    assert dropped.tokens.dtype == torch.int64
