"""hpu/profiling/diagnostics.py with a simulated runtime."""

import logging

import pytest

from config.execution import ExecutionConfig
from hpu.backends.cpu import CpuBackend, CpuEvent
from hpu.profiling.diagnostics import RuntimeDiagnostics
from hpu.protocol import DECODE, PREFILL, Launch
from hpu.runner.async_output import AsyncLaunchOutput, AsyncStepOutput
from hpu.runner.counters import Counters


class Runtime:
    """Simulated runtime whose counters a test changes."""

    def __init__(self) -> None:
        self.compiled = 40
        self.on_host = {"aten::nonzero": 3}
        self.recipes = (10, 40)
        self.details = [("old", 5)]

    def compilations(self) -> int:
        return self.compiled

    def compile_seconds(self) -> float:
        return self.compiled / 2

    def compiled_recipes(self) -> list[tuple[str, int]]:
        return self.details

    def cpu_fallbacks(self) -> dict[str, int]:
        return self.on_host

    def recipe_cache(self) -> tuple[int, int]:
        return self.recipes

    def diagnostics(
        self, counters: Counters, *, counts_by_phase: bool = False, **config: bool
    ) -> RuntimeDiagnostics:
        return RuntimeDiagnostics(
            self, ExecutionConfig(**config), counters, counts_by_phase=counts_by_phase
        )


def step(number: int) -> AsyncStepOutput:
    launch = Launch(DECODE, (8, 1, 64), [0, 1, 2])
    pending = AsyncLaunchOutput([0, 1, 2], [], CpuEvent(), launch=launch)
    return AsyncStepOutput(number, 0.0, launches=[pending])


def test_events_are_counted_after_warm_up_and_recipes_from_the_start() -> None:
    runtime, counters = Runtime(), Counters()
    diagnostics = runtime.diagnostics(counters)

    diagnostics.collected(step(0))
    runtime.compiled, runtime.recipes = 42, (15, 42)
    runtime.on_host = {"aten::nonzero": 4, "aten::unique": 2}
    diagnostics.collected(step(1))
    runtime.compiled = 50
    diagnostics.reset()
    diagnostics.collected(step(2))

    assert counters.take_changed() == {
        "recompilations": 2,
        "cpu_fallbacks": 3,
        "recipe_hits": 15,
        "recipe_misses": 42,
    }


def test_a_step_that_compiled_or_fell_back_is_logged_with_its_shapes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = Runtime()
    diagnostics = runtime.diagnostics(
        Counters(), log_graph_compilation=True, log_cpu_fallbacks=True
    )
    caplog.set_level(logging.INFO)

    diagnostics.collected(step(6))
    runtime.compiled += 2
    runtime.on_host = {"aten::nonzero": 4}
    diagnostics.collected(step(7))

    assert [record.getMessage() for record in caplog.records] == [
        "Step 7 compiled 2 graphs: decode (8, 1, 64) with 3 requests",
        "Step 7 ran 1 operations on the host (aten::nonzero 1): decode (8, 1, 64) with 3 requests",
    ]


def test_names_of_recipes_are_logged_if_the_runtime_records_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = Runtime()
    diagnostics = runtime.diagnostics(Counters(), log_graph_compilation=True)

    for number in (7, 8):
        runtime.compiled += 1
        runtime.details = [*runtime.details, (f"attention_{number}", 2_000_000)]
        diagnostics.collected(step(number))

    assert [record.getMessage() for record in caplog.records] == [
        f"Step {number} compiled 1 graphs (attention_{number} 2.0 s): "
        "decode (8, 1, 64) with 3 requests"
        for number in (7, 8)
    ]


def test_every_step_is_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    diagnostics = Runtime().diagnostics(
        Counters(), log_graph_compilation_all=True, log_cpu_fallbacks_all=True
    )
    caplog.set_level(logging.INFO)

    diagnostics.collected(step(8))

    assert [record.getMessage() for record in caplog.records] == [
        "Step 8 compiled 0 graphs: decode (8, 1, 64) with 3 requests",
        "Step 8 ran 0 operations on the host: decode (8, 1, 64) with 3 requests",
    ]


def test_a_cpu_reports_no_counters() -> None:
    assert CpuBackend(1).runtime_metrics is None


@pytest.mark.parametrize("captures", [True, False])
def test_without_graphs_compilations_are_reported_by_phase(captures: bool) -> None:
    runtime, counters = Runtime(), Counters()
    diagnostics = runtime.diagnostics(counters, counts_by_phase=not captures)

    runtime.compiled += 3
    diagnostics.warmed_up(PREFILL)
    runtime.compiled += 1
    diagnostics.collected(step(0))

    counts = counters.take_changed()
    by_phase = {name: count for name, count in counts.items() if name.startswith("compil")}
    told = {
        "compilations.prefill.warmup": 3,
        "compile_seconds.warmup": 1.5,
        "compilations.decode.serving": 1,
        "compile_seconds.serving": 0.5,
    }
    assert by_phase == ({} if captures else told)
    assert counts["recompilations"] == 1
