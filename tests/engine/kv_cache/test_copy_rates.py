"""Choice between copying and recomputing blocks, by measured times."""

import pytest

from engine.kv_cache.copy_rates import CopyRates


def test_blocks_are_copied_before_the_first_measurement() -> None:
    rates = CopyRates(16, load_s=5.0)

    assert rates.loads and rates.fetches and rates.compute_s is None


def test_a_block_is_copied_if_that_is_faster_than_its_tokens_are_computed() -> None:
    rates = CopyRates(16, load_s=0.001)
    rates.add_prefill(1600, 0.2)

    assert rates.compute_s == pytest.approx(0.002) and rates.loads
    rates.add_fetch(10, 0.02)
    assert not rates.fetches and rates.loads


def test_a_short_prompt_hardly_changes_the_estimate_and_a_new_speed_does() -> None:
    rates = CopyRates(10, load_s=0.001)
    for _ in range(100):
        rates.add_prefill(1000, 1.0)
    rates.add_prefill(1, 0.5)

    assert rates.compute_s == pytest.approx(0.01, rel=0.02)
    for _ in range(200):
        rates.add_prefill(1000, 0.01)
    assert rates.compute_s == pytest.approx(0.0001, rel=2.0) and not rates.loads
