"""engine/core/prefill_rate.py: the rate at which waiting prompts are computed."""

import pytest

from engine.core.prefill_rate import MEAN_S, PrefillRate


def observe(rate: PrefillRate, start_s: float, steps: list[tuple[int, float, bool]]) -> float:
    now_s = start_s
    for num_tokens, seconds, has_waiting in steps:
        now_s += seconds
        rate.observe(num_tokens, now_s, has_waiting=has_waiting)
    return now_s


def test_the_rate_is_the_prompt_tokens_per_second() -> None:
    rate = PrefillRate()
    rate.begin(10.0)

    observe(rate, 10.0, [(100, 0.1, False)] * 50)

    assert rate.tokens_per_s == pytest.approx(1000)


def test_decodes_are_counted_only_while_requests_wait() -> None:
    rate = PrefillRate()
    rate.begin(0.0)
    now_s = observe(rate, 0.0, [(100, 0.1, False), *[(0, 0.1, False)] * 100])
    assert rate.tokens_per_s == pytest.approx(1000)

    now_s = observe(rate, now_s, [(0, 0.1, True)] * 5)

    # The initial measurements have the weight of half a second.
    assert rate.tokens_per_s == pytest.approx(500)
    observe(rate, now_s, [(0, 0.1, True)] * 40)
    assert rate.tokens_per_s == pytest.approx(100)


def test_the_rate_is_averaged_over_seconds_while_requests_wait_for_long() -> None:
    rate = PrefillRate()
    rate.begin(0.0)
    now_s = observe(rate, 0.0, [(100, 0.1, True)] * 100)

    observe(rate, now_s, [(0, 0.01, True)] * round(MEAN_S * 100))

    assert rate.tokens_per_s == pytest.approx(1000 / 2.718, rel=0.01)


def test_idle_time_is_not_counted() -> None:
    rate = PrefillRate()
    rate.begin(0.0)
    observe(rate, 0.0, [(100, 0.1, False)])

    rate.begin(1000.0)
    observe(rate, 1000.0, [(100, 0.1, False)])

    assert rate.tokens_per_s == pytest.approx(1000)


def test_the_rate_follows_a_change() -> None:
    rate = PrefillRate()
    rate.begin(0.0)
    now_s = observe(rate, 0.0, [(100, 0.1, True)] * 100)

    observe(rate, now_s, [(50, 0.1, True)] * 500)

    assert rate.tokens_per_s == pytest.approx(500, rel=0.01)
