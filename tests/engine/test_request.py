"""engine/request.py: state and parameters of a request."""

from array import array
from typing import Any

import numpy as np
import pytest
from slow_model import raw

from config.params.sampling import SamplingParams
from config.params.token_ids import packed
from engine.request import ModelLimits, Request
from engine.transport.messages import AddRequest

LIMITS = ModelLimits(max_model_len=20, vocab_size=50, eos_ids=frozenset({2}))


def make(prompt: list[int], *, key: int = 1, **sampling: object) -> Request:
    return Request(
        AddRequest(key, raw(prompt), SamplingParams(**sampling)),  # type: ignore[arg-type]
        [],
        seed=99,
        priority_key=(0, 0),
        limits=LIMITS,
        arrived_at=0.0,
    )


def test_without_max_tokens_the_limit_is_the_rest_of_the_context() -> None:
    assert make([1] * 5, max_tokens=None).max_num_tokens == 20
    assert make([1] * 5, max_tokens=100).max_num_tokens == 20
    assert make([1] * 5, max_tokens=3).max_num_tokens == 8


def test_the_top_bits_of_a_key_name_the_front_end() -> None:
    assert make([1], key=(3 << 48) | 17).front_end == 3


def test_end_tokens_include_the_models_and_the_requested_tokens() -> None:
    plain = make([1], stop_token_ids=(2, 7))
    ignoring = make([1], stop_token_ids=(7,), ignore_eos=True)

    assert plain.end_ids == {2, 7}
    assert plain.stop_ids == {7}
    assert ignoring.end_ids == ignoring.stop_ids == {7}


def test_a_stop_token_outside_the_vocabulary_never_reaches_the_device() -> None:
    request = make([1], stop_token_ids=(7, 50, 4_000_000), min_tokens=1)

    assert request.request_sampling().end_token_ids == (2, 7)


def test_duplicate_and_out_of_range_stop_token_ids_are_removed() -> None:
    listed = (*range(3, 50, 3), *range(3, 50, 3)) * 40 + (90, 4_000_000)
    few = make([1], stop_token_ids=tuple(range(3, 50, 3)), min_tokens=1)
    for ids in (listed, packed(np.array(listed))):
        many = make([1], stop_token_ids=ids, min_tokens=1)

        assert list(many.stop_ids) == sorted(few.stop_ids)
        assert list(many.end_ids) == sorted(few.end_ids)
        assert many.request_sampling() == few.request_sampling()


def test_request_sampling_normalizes_neutral_values_and_sets_the_seed() -> None:
    row = make([1], top_k=-1, logit_bias={9: 1.0, 3: -1.0}).request_sampling()

    assert (row.top_k, row.seed, row.num_logprobs, row.num_prompt_logprobs) == (0, 99, -1, -1)
    assert row.logit_bias == ((3, -1.0), (9, 1.0))
    assert row.end_token_ids == ()


class ReadTail(array):
    """Output tokens that must not be read, except for the last two."""

    def __getitem__(self, place: Any) -> Any:
        assert isinstance(place, slice) and len(self) - place.start <= 2
        return super().__getitem__(place)

    def __iter__(self) -> Any:
        raise AssertionError("all output tokens are read")


@pytest.mark.parametrize(
    ("words", "last", "expected"),
    [((), 5, False), (((5,),), 5, False), (((5,), (7, 8, 6)), 8, True), (((5,), (8, 6)), 7, False)],
)
def test_only_the_end_of_a_long_output_is_compared_with_bad_words(
    words: tuple[tuple[int, ...], ...], last: int, expected: bool
) -> None:
    request = make([1], allowed_token_ids=(5, 6), bad_words_token_ids=words)
    request.output_token_ids = ReadTail("I", [7] * 1_000 + [7, last])

    assert request.has_no_allowed_token == expected


@pytest.mark.parametrize(("asked", "told"), [(5e-324, 1e-30), (1e308, 1e30), (1.25, 1.25)])
def test_a_repetition_penalty_stays_within_what_32_bits_can_apply(
    asked: float, told: float
) -> None:
    row = make([1], repetition_penalty=asked).request_sampling()

    assert row.repetition_penalty == pytest.approx(told)


def test_prompt_logprobs_are_requested_until_all_were_sent() -> None:
    request = make([1, 2, 3], prompt_logprobs=2)
    before = request.request_sampling()

    request.num_prompt_logprobs = 2

    assert before.num_prompt_logprobs == 2
    assert request.request_sampling().num_prompt_logprobs == -1
    assert request.request_sampling().temperature == before.temperature


def test_token_ids_returns_the_prompt_and_the_output() -> None:
    request = make([5, 6, 7])
    fresh = bytes(request.token_ids())
    request.output_token_ids.extend([8, 9])
    request.num_tokens += 2

    assert fresh == bytes(raw([5, 6, 7]))
    assert bytes(request.token_ids()) == bytes(raw([5, 6, 7, 8, 9]))
    assert request.token_bytes(0, 2) == bytes(raw([5, 6]))
    assert request.token_bytes(2, 4) == bytes(raw([7, 8]))
    assert request.token_bytes(3, 5) == bytes(raw([8, 9]))
