"""BatchState: applies a plan's changes and builds a bucket's inputs."""

import numpy as np
import pytest

from hpu.backends.cpu import CpuBackend
from hpu.launch_inputs import DecodeArrays, PrefillArrays
from hpu.protocol import DECODE, PREFILL, Launch, NewRequest, RequestSampling
from hpu.runner.batch_state import BatchState
from hpu.runner.input_buffers import DecodeLayout, PrefillLayout

PAD = 50
BLOCK = 4


def _state() -> BatchState:
    return BatchState(max_num_reqs=4, max_model_len=32, block_size=BLOCK, pad_block=PAD)


def _new(req_index: int, tokens: list[int], blocks: list[int], *, computed: int = 0) -> NewRequest:
    raw = memoryview(np.array(tokens, "<u4").tobytes())
    return NewRequest(req_index, raw, len(tokens), computed, blocks, RequestSampling())


def _prefill(state: BatchState, launch: Launch) -> tuple[PrefillArrays, list[int]]:
    bucket = (PREFILL, *launch.bucket)
    arrays = PrefillLayout().buffers(bucket, CpuBackend(1), is_static=False).host_arrays()
    return arrays, state.fill_prefill(launch, arrays)


def _decode(state: BatchState, launch: Launch) -> DecodeArrays:
    bucket = (DECODE, *launch.bucket)
    arrays = DecodeLayout().buffers(bucket, CpuBackend(1), is_static=False).host_arrays()
    state.fill_decode(launch, arrays)
    return arrays


def test_a_prefill_writes_each_requests_next_tokens_to_its_slots() -> None:
    state = _state()
    state.add_request(_new(2, [11, 12, 13, 14, 15, 16], [7, 3]))
    state.add_request(_new(0, [21, 22], [5]))

    arrays, sampling = _prefill(
        state, Launch(PREFILL, (2, 6, 0), [2, 0], query_lens=[6, 2], samples=[True, True])
    )

    assert arrays.tokens.tolist() == [[11, 12, 13, 14, 15, 16], [21, 22, 0, 0, 0, 0]]
    assert arrays.positions.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 0, 0, 0, 0]]
    assert arrays.slot_mapping[0].tolist() == [28, 29, 30, 31, 12, 13]
    assert arrays.slot_mapping[1, :2].tolist() == [20, 21]
    assert arrays.query_lens.tolist() == [6, 2]
    assert arrays.context_lens.tolist() == [0, 0]
    assert (sampling, arrays.last_token_indices.tolist(), arrays.req_indices.tolist()) == (
        [2, 0],
        [5, 7],
        [2, 0],
    )


def test_a_chunk_attends_only_to_its_earlier_blocks() -> None:
    state = _state()
    state.add_request(_new(1, list(range(100, 112)), [9, 8, 7], computed=0))
    _prefill(state, Launch(PREFILL, (1, 6, 0), [1], query_lens=[6], samples=[False]))

    arrays, sampling = _prefill(
        state, Launch(PREFILL, (1, 8, 3), [1], query_lens=[6], samples=[True])
    )

    assert arrays.tokens[0, :6].tolist() == [106, 107, 108, 109, 110, 111]
    assert arrays.context_lens.tolist() == [6]
    assert arrays.block_list.tolist() == [[9, 8, 9]]
    assert arrays.slot_mapping[0, :6].tolist() == [34, 35, 28, 29, 30, 31]
    assert (sampling, arrays.last_token_indices.tolist()) == ([1], [5])


def test_prompts_in_one_row_are_consecutive() -> None:
    state = _state()
    state.add_request(_new(1, list(range(100, 112)), [9, 8, 7], computed=5))
    state.add_request(_new(0, [21, 22], [5]))
    layout = PrefillLayout(prompts_per_row=3)
    arrays = layout.buffers((PREFILL, 1, 8, 3), CpuBackend(1), is_static=False).host_arrays()

    sampling = state.fill_prefill(
        Launch(PREFILL, (1, 8, 3), [1, 0], query_lens=[3, 2], samples=[False, True]), arrays
    )

    assert arrays.tokens.tolist() == [[105, 106, 107, 21, 22, 0, 0, 0]]
    assert arrays.positions.tolist() == [[5, 6, 7, 0, 1, 0, 0, 0]]
    assert arrays.slot_mapping[0, :5].tolist() == [33, 34, 35, 20, 21]
    assert set(arrays.slot_mapping[0, 5:] // BLOCK) == {PAD}
    assert (arrays.query_lens.tolist(), arrays.context_lens.tolist()) == ([3, 2, 0], [5, 0, 0])
    assert arrays.block_list.tolist() == [[9, 8, PAD]]
    assert (sampling, arrays.last_token_indices.tolist()) == ([0], [4, 0, 0])
    assert arrays.req_indices.tolist() == [0, 4, 4]


def test_a_row_too_short_for_its_prompts_is_an_error_with_the_numbers() -> None:
    state = _state()
    state.add_request(_new(0, [1, 2, 3], [5]))
    state.add_request(_new(1, [1, 2, 3], [6]))
    layout = PrefillLayout(prompts_per_row=2)
    arrays = layout.buffers((PREFILL, 1, 5, 0), CpuBackend(1), is_static=False).host_arrays()

    with pytest.raises(RuntimeError, match=r"2 requests of \[3, 3\] tokens do not fit \(1, 5, 0\)"):
        state.fill_prefill(
            Launch(PREFILL, (1, 5, 0), [0, 1], query_lens=[3, 3], samples=[True] * 2), arrays
        )


def test_padding_writes_only_to_the_pad_block_spread_over_its_slots() -> None:
    state = _state()
    state.add_request(_new(0, [1, 2, 3], [5]))

    arrays, _ = _prefill(state, Launch(PREFILL, (2, 8, 1), [0], query_lens=[3], samples=[True]))

    padded = np.concatenate([arrays.slot_mapping[0, 3:], arrays.slot_mapping[1]])
    assert set(padded // BLOCK) == {PAD}
    assert set(padded % BLOCK) == {0, 1, 2, 3}
    assert arrays.query_lens.tolist() == [3, 0]
    assert not arrays.tokens[1].any() and not arrays.positions[1].any()
    # The pad block may hold NaN of the padding that was written to it: no prompt reads it.
    assert arrays.block_list.tolist() == [[5], [PAD]]
    assert arrays.req_indices.tolist() == [0, 4]


def test_a_decode_lists_blocks_request_by_request() -> None:
    state = _state()
    state.add_request(_new(3, list(range(9)), [4, 6, 2]))
    state.add_request(_new(1, list(range(3)), [8]))
    launch = Launch(PREFILL, (2, 9, 0), [3, 1], query_lens=[9, 3], samples=[True, True])
    _prefill(state, launch)

    arrays = _decode(state, Launch(DECODE, (2, 1, 4), [1, 3]))

    assert arrays.req_indices.tolist() == [1, 3]
    assert arrays.positions.tolist() == [[3], [9]]
    assert arrays.slot_mapping.tolist() == [8 * BLOCK + 3, 2 * BLOCK + 1]
    assert arrays.block_list.tolist() == [8, 4, 6, 2]
    assert arrays.block_groups.tolist() == [0, 1, 1, 1]
    assert arrays.block_starts.tolist() == [0, 0, 4, 8]
    assert arrays.block_usage.tolist() == [4, 4, 4, 2]


def test_a_padded_decode_writes_to_the_pad_block_and_does_not_read_it() -> None:
    state = _state()
    state.add_request(_new(0, [1], [5]))
    _prefill(state, Launch(PREFILL, (1, 1, 0), [0], query_lens=[1], samples=[True]))

    arrays = _decode(state, Launch(DECODE, (4, 1, 6), [0]))

    assert arrays.req_indices.tolist() == [0, 4, 4, 4]
    assert set(arrays.slot_mapping[1:] // BLOCK) == {PAD}
    # The pad block may hold NaN, and attention weighs padding with 0.
    assert arrays.block_list.tolist() == [5] * 6
    assert arrays.block_groups.tolist() == [0] + [-1] * 5
    assert arrays.block_usage.tolist() == [2] + [1] * 5


def test_a_decode_may_follow_before_the_sampled_token_is_known() -> None:
    state = _state()
    state.add_request(_new(0, [1, 2, 3], [5]))
    _prefill(state, Launch(PREFILL, (1, 3, 0), [0], query_lens=[3], samples=[True]))
    _decode(state, Launch(DECODE, (1, 1, 1), [0]))
    state.append_blocks(0, [6])

    arrays = _decode(state, Launch(DECODE, (1, 1, 2), [0]))

    assert arrays.positions.tolist() == [[4]]
    assert arrays.slot_mapping.tolist() == [6 * BLOCK]


def test_a_reused_index_has_only_the_blocks_of_its_new_request() -> None:
    state = _state()
    state.add_request(_new(0, [1, 2, 3, 4, 5], [5, 6]))
    state.remove_request(0)

    state.add_request(_new(0, [7], [9]))

    assert state.exclusive_blocks(0) == [9]
    assert state.num_computed_tokens(0) == 0


def test_prompt_targets_end_with_the_prompt() -> None:
    state = _state()
    tokens = memoryview(np.array([1, 2, 3, 4, 5, 6], "<u4").tobytes())
    state.add_request(NewRequest(0, tokens, 4, 0, [1, 2], RequestSampling(num_prompt_logprobs=0)))

    found = [state.prompt_targets(0, start, 2).tolist() for start in (0, 2, 3, 4)]

    assert found == [[2, 3], [4], [], []]


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (Launch(PREFILL, (1, 4, 0), [0], query_lens=[5], samples=[False]), r"of \[5\] tokens"),
        (
            Launch(PREFILL, (1, 9, 0), [0], query_lens=[9], samples=[False]),
            "exceed their remaining",
        ),
        (Launch(PREFILL, (1, 4, 0), [3], query_lens=[1], samples=[False]), "not all are live"),
        (Launch(PREFILL, (1, 4, 0), [0], query_lens=[4], samples=[True]), "before their last"),
        (Launch(PREFILL, (1, 8, 0), [0], query_lens=[8], samples=[True]), "its blocks hold 4"),
    ],
)
def test_a_prefill_that_contradicts_its_bucket_or_its_requests_is_an_error(
    launch: Launch, words: str
) -> None:
    state = _state()
    state.add_request(_new(0, list(range(8)), [5]))

    with pytest.raises(RuntimeError, match=words):
        _prefill(state, launch)


def test_a_decode_that_does_not_fit_its_bucket_is_an_error_with_the_numbers() -> None:
    state = _state()
    state.add_request(_new(0, list(range(8)), [5, 6, 7]))
    _prefill(state, Launch(PREFILL, (1, 8, 0), [0], query_lens=[8], samples=[True]))

    with pytest.raises(RuntimeError, match="1 requests over 3 blocks"):
        _decode(state, Launch(DECODE, (1, 1, 2), [0]))


def test_decoding_before_the_end_of_the_prompt_raises() -> None:
    state = _state()
    state.add_request(_new(0, list(range(8)), [5, 6]))

    with pytest.raises(RuntimeError, match="exactly one uncomputed token"):
        _decode(state, Launch(DECODE, (1, 1, 2), [0]))


def test_a_wrong_index_block_or_length_of_a_request_is_refused() -> None:
    state = _state()
    state.add_request(_new(0, [1], [5]))

    for wrong in (_new(0, [1], [5]), _new(9, [1], [5]), _new(1, [1], [PAD]), _new(1, [], [5])):
        with pytest.raises(RuntimeError):
            state.add_request(wrong)
    with pytest.raises(RuntimeError, match="request 2 of 4"):
        state.remove_request(2)


def test_a_requests_own_blocks_exclude_a_shared_prefix() -> None:
    state = _state()
    state.add_request(_new(0, [1] * 9, [5, 6, 7]))
    state.add_request(_new(1, [1] * 9, [5, 6, 8], computed=8))
    shared = state.exclusive_blocks(0)

    state.remove_request(1)

    assert (shared, state.exclusive_blocks(0)) == ([7], [5, 6, 7])


def test_a_decode_over_a_slice_describes_each_block_at_its_own_number() -> None:
    state = BatchState(
        max_num_reqs=4, max_model_len=32, block_size=BLOCK, pad_block=PAD, contiguous=True
    )
    state.add_request(_new(1, [1, 2, 3, 4, 5], [6, 2]))
    state.add_request(_new(0, [7, 8], [3]))
    _prefill(state, Launch(PREFILL, (2, 5, 0), [1, 0], query_lens=[5, 2], samples=[True, True]))

    arrays = _decode(state, Launch(DECODE, (3, 1, 9), [1, 0]))

    assert arrays.block_groups.tolist() == [-1, -1, 0, 1, -1, -1, 0, -1, -1]
    assert arrays.block_starts.tolist() == [0, 0, 4, 0, 0, 0, 0, 0, 0]
    assert arrays.block_usage.tolist() == [1, 1, 2, 3, 1, 1, 4, 1, 1]
    assert arrays.slot_mapping.tolist() == [2 * BLOCK + 1, 3 * BLOCK + 2, PAD * BLOCK]


def test_a_slice_that_ends_below_a_requests_block_is_an_error_with_the_numbers() -> None:
    state = BatchState(
        max_num_reqs=4, max_model_len=32, block_size=BLOCK, pad_block=PAD, contiguous=True
    )
    state.add_request(_new(0, [1], [6]))
    _prefill(state, Launch(PREFILL, (1, 1, 0), [0], query_lens=[1], samples=[True]))

    with pytest.raises(RuntimeError, match="over 7 blocks do not fit"):
        _decode(state, Launch(DECODE, (1, 1, 6), [0]))


def test_a_moved_block_is_found_at_its_new_number() -> None:
    state = _state()
    state.add_request(_new(2, [1, 2, 3, 4, 5], [7, 40]))
    state.add_request(_new(0, [1], [3]))

    state.move_blocks([40, 3], [1, 2])

    assert (state.exclusive_blocks(2), state.exclusive_blocks(0)) == ([1, 7], [2])
    with pytest.raises(RuntimeError, match=r"must be from 0 to 49"):
        state.move_blocks([1], [PAD])


def test_requests_that_share_a_block_cannot_be_decoded_over_a_slice() -> None:
    state = BatchState(
        max_num_reqs=4, max_model_len=32, block_size=BLOCK, pad_block=PAD, contiguous=True
    )
    for req_index in (0, 1):
        state.add_request(_new(req_index, [1, 2, 3, 4, 5], [6, req_index], computed=4))
    _prefill(state, Launch(PREFILL, (2, 1, 1), [0, 1], query_lens=[1, 1], samples=[True, True]))

    with pytest.raises(RuntimeError, match="hold 4 blocks, and 3 of them differ"):
        _decode(state, Launch(DECODE, (2, 1, 8), [0, 1]))


def test_tokens_known_from_another_stage_replace_the_tokens_of_the_request() -> None:
    state = BatchState(max_num_reqs=2, max_model_len=16, block_size=4, pad_block=8)
    tokens = memoryview(np.array([5, 6, 7], "<u4").tobytes())
    state.add_request(NewRequest(0, tokens, 3, 0, [2, 3], RequestSampling()))

    state.set_sampled(0, 6, np.array([7, 8, 9, 10], np.uint32))
    grown = state.tokens(0).tolist()
    state.set_sampled(0, 2, np.array([0, 0, 1, 2], np.uint32))

    assert grown == [5, 6, 7, 8, 9, 10]
    assert state.tokens(0).tolist() == [1, 2]
    assert state.num_computed_tokens(0) == 1
