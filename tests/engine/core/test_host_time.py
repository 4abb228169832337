"""What a step costs the engine, as ratios: benchmarks/host.py has the numbers. The processor's time
of one thread, the least of a few runs by turns, so that a busy machine changes little."""

from statistics import median

from benchmarks.host_rig import watch_decodes, watch_growth

NUM_STEPS = 100
RUNS = 3
ROWS, CONTEXT = 64, 1024


def seconds_a_step(*loads: tuple[int, int, int]) -> list[float]:
    """Of each load: running requests, requests that wait, context."""
    runs = [[median(watch_decodes(*load, NUM_STEPS).cpu) for load in loads] for _ in range(RUNS)]
    return [min(times) for times in zip(*runs, strict=True)]


def test_a_request_costs_no_more_among_many() -> None:
    few, many = seconds_a_step((64, 0, CONTEXT), (1024, 0, CONTEXT))

    assert many / 1024 < 1.5 * few / 64, f"{few * 1e6:.0f} us for 64, {many * 1e6:.0f} for 1024"


def test_neither_a_long_line_nor_a_long_context_costs_a_step_anything() -> None:
    plain, behind_a_line, far_on = seconds_a_step(
        (ROWS, 0, CONTEXT), (ROWS, 30_000, CONTEXT), (ROWS, 0, 131_072)
    )

    assert behind_a_line < 1.5 * plain, f"{plain * 1e6:.0f} us, {behind_a_line * 1e6:.0f} us"
    assert far_on < 1.5 * plain, f"{plain * 1e6:.0f} us, {far_on * 1e6:.0f} us"


def test_a_step_costs_no_more_after_thousands_of_requests() -> None:
    growth = watch_growth(20_000)

    assert growth.late_s < 1.5 * growth.early_s, f"{growth.early_s} s, then {growth.late_s} s"
    assert growth.resident < 8 << 20, f"{growth.resident} bytes more"
