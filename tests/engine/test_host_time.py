"""What a step costs the engine, as ratios: benchmarks/host.py has the numbers. The processor's time
of one thread, the least of a few runs, so that a busy machine changes little."""

from statistics import median

from benchmarks.host_rig import watch_decodes, watch_growth

NUM_STEPS = 100
RUNS = 3
ROWS, CONTEXT = 64, 1024


def seconds_a_step(rows: int = ROWS, *, waiting: int = 0, context: int = CONTEXT) -> float:
    runs = (watch_decodes(rows, waiting, context, NUM_STEPS) for _ in range(RUNS))
    return min(median(times.cpu) for times in runs)


def test_a_row_costs_no_more_among_many() -> None:
    few, many = seconds_a_step(64), seconds_a_step(1024)

    assert many / 1024 < 1.5 * few / 64, f"{few * 1e6:.0f} us for 64, {many * 1e6:.0f} for 1024"


def test_neither_a_long_line_nor_a_long_context_costs_a_step_anything() -> None:
    plain = seconds_a_step()
    behind_a_line = seconds_a_step(waiting=30_000)
    far_on = seconds_a_step(context=131_072)

    assert behind_a_line < 1.5 * plain, f"{plain * 1e6:.0f} us, {behind_a_line * 1e6:.0f} us"
    assert far_on < 1.5 * plain, f"{plain * 1e6:.0f} us, {far_on * 1e6:.0f} us"


def test_a_step_costs_no_more_after_thousands_of_requests() -> None:
    growth = watch_growth(20_000)

    assert growth.late_s < 1.5 * growth.early_s, f"{growth.early_s} s, then {growth.late_s} s"
    assert growth.resident < 8 << 20, f"{growth.resident} bytes more"
