"""The number of drafts that are verified maximizes tokens per second."""

import random

import pytest

from hpu.spec_decode.base import DraftingCosts, Proposal
from hpu.spec_decode.draft_lengths import MAX_PAUSE, DraftLengths
from hpu.spec_decode.launch_costs import ROWS, LaunchCosts, measure

FREE = LaunchCosts([1, 64], [1.0, 1.0001])
DEAR = LaunchCosts([1, 64], [1.0, 64.0])
FIFTH = LaunchCosts([1, 64], [1.0, 1.0 + 63 * 0.2])
STEP = LaunchCosts([1, 32, 33, 64], [1.0, 1.5, 1.8, 2.5])
"""Costs with tiles of 32 rows."""


def simulate(
    costs: LaunchCosts,
    probability: float,
    *,
    num_requests: int = 1,
    num_tokens: int = 400,
    measured: LaunchCosts | None = None,
) -> float:
    """Tokens per second with drafts that are right with `probability`, divided by the rate without
    drafts. `measured`: costs of DraftLengths instead of the true `costs`; with them, each
    request ends after about 64 tokens and the next begins."""
    rng = random.Random(1)
    lengths = DraftLengths(5)
    lengths.costs = measured or costs
    ages = [2 * index for index in range(num_requests)]
    for index in range(num_requests):
        lengths.add_request(index)
    tokens, seconds = 0, 0.0
    indices = list(range(num_requests))
    while tokens < num_requests * num_tokens:
        lengths.begin_launch(num_requests)
        proposals = [Proposal([0] * lengths.wanted(index), 4) for index in indices]
        chosen = lengths.choose(indices, proposals)
        seconds += costs.seconds(num_requests + sum(chosen))
        for index, count in zip(indices, chosen, strict=True):
            accepted = 0
            while accepted < count and rng.random() < probability:
                accepted += 1
            tokens += 1 + accepted
            if count:
                lengths.verified(index, count, accepted)
            ages[index] += 1 + accepted
            if measured is not None and ages[index] >= 64:
                ages[index] = 0
                lengths.remove_request(index)
                lengths.add_request(index)
    return tokens / seconds / (num_requests / costs.seconds(num_requests))


@pytest.mark.parametrize("num_requests", [1, 32])
@pytest.mark.parametrize("costs", [FREE, FIFTH, DEAR, STEP])
def test_rejected_drafts_slow_decoding_by_at_most_3_percent(
    costs: LaunchCosts, num_requests: int
) -> None:
    assert simulate(costs, 0.0, num_requests=num_requests) > 0.97


@pytest.mark.parametrize("num_requests", [1, 32])
def test_underestimated_row_costs_slow_decoding_by_at_most_3_percent(num_requests: int) -> None:
    # Although rows are measured as free, the first extra row takes a fifth of the launch.
    costs = LaunchCosts([num_requests, num_requests + 1, 2 * num_requests + 1], [1.0, 1.2, 1.7])

    found = simulate(costs, 0.0, num_requests=num_requests, num_tokens=4000, measured=FREE)

    assert found > 0.97


def test_accepted_drafts_speed_up_decoding_if_rows_are_cheap() -> None:
    assert simulate(FIFTH, 1.0) > 2.5
    assert simulate(FREE, 0.9) > 3.5
    assert simulate(FREE, 0.9, num_requests=32) > 3.0


@pytest.mark.parametrize("probability", [0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("num_requests", [1, 32])
def test_expensive_rows_slow_decoding_by_at_most_3_percent(
    probability: float, num_requests: int
) -> None:
    assert simulate(DEAR, probability, num_requests=num_requests) > 0.97


def test_drafts_reach_full_length_again_when_they_begin_to_be_accepted() -> None:
    lengths = DraftLengths(5)
    lengths.costs = FIFTH
    lengths.add_request(0)
    for _ in range(300):
        lengths.begin_launch(1)
        count = lengths.choose([0], [Proposal([0] * lengths.wanted(0), 4)])[0]
        lengths.verified(0, count, 0)

    counts = []
    for _ in range(MAX_PAUSE + 50):
        lengths.begin_launch(1)
        count = lengths.choose([0], [Proposal([0] * lengths.wanted(0), 4)])[0]
        lengths.verified(0, count, count)
        counts.append(count)

    assert counts[-1] == 5


def test_without_costs_all_drafts_are_verified() -> None:
    lengths = DraftLengths(5)
    lengths.add_request(3)
    for _ in range(50):
        assert lengths.wanted(3) == 5
        assert lengths.choose([3], [Proposal([1, 2, 3])]) == [3]
        lengths.verified(3, 3, 0)


def test_launch_costs_are_interpolated_non_decreasing_and_serializable() -> None:
    costs = LaunchCosts([1, 2, 4], [1.0, 0.5, 2.0])

    again = LaunchCosts.decoded(costs.encoded())

    assert [again.seconds(rows) for rows in (1, 2, 3, 4, 6)] == [0.5, 0.5, 1.25, 2.0, 3.5]


def test_launch_costs_are_measured_up_to_the_maximum_rows_within_a_budget() -> None:
    calls: list[int] = []

    costs = measure(calls.append, 7)

    assert set(calls) == {1, 2, 3, 4, 5, 6, 7}
    assert costs.seconds(7) >= costs.seconds(1)
    calls.clear()
    measure(calls.append, 7, budget_s=0.0)
    assert calls == [1, 2]


def test_the_first_row_after_a_full_tile_is_measured() -> None:
    assert all({size, size + 1} <= set(ROWS) for size in (16, 32, 64, 128))
    assert list(ROWS) == sorted(ROWS)


def planned(drafter_s: float, pending: int, num_requests: int = 1) -> list[int]:
    """Draft counts for a drafter whose launches take `drafter_s`, with decodes of a second."""
    lengths = DraftLengths(4)
    lengths.costs = LaunchCosts([1, 64], [1.0, 1.2])
    lengths.drafting = DraftingCosts(
        LaunchCosts([1, 64], [drafter_s, 2 * drafter_s]), lambda req_index, num_tokens: pending
    )
    indices = list(range(num_requests))
    for index in indices:
        lengths.add_request(index)
    lengths.begin_launch(num_requests)
    return lengths.plan(num_requests, indices, [4] * num_requests, [100] * num_requests)


def test_the_cost_of_a_drafter_is_counted() -> None:
    assert planned(0.01, pending=1) == [4]
    assert planned(0.2, pending=1) == [1]
    assert planned(1.0, pending=1) == [0]
    assert sum(planned(0.2, pending=1, num_requests=8)) >= 8


def test_the_cost_of_prompt_tokens_missing_in_the_drafter_is_amortized() -> None:
    assert planned(0.1, pending=300)[0] > 0
    assert planned(0.1, pending=30_000) == [0]
