"""Diagnostics: counters of the runtime's compilations, host fallbacks and recipe cache lookups, and
log lines of compilations and fallbacks."""

import logging
from collections.abc import Mapping

from config.execution import ExecutionConfig
from hpu.backends.runtime_metrics import RuntimeMetrics
from hpu.runner.async_output import AsyncStepOutput
from hpu.runner.counters import Counters, phase_name

logger = logging.getLogger(__name__)


class Diagnostics:
    """Counts the work of a runtime. This base class counts nothing, for a device without
    metrics."""

    def reset(self) -> None:
        """Exclude earlier compilations and fallbacks from the next counts."""

    def warmed_up(self, phase: int) -> None:
        """Exclude the compilations of a warmed-up bucket of `phase` from the counts of the next
        step. With `counts_by_phase`, count them as compilations of the warm-up."""

    def collected(self, output: AsyncStepOutput) -> None:
        """Count compilations, fallbacks and recipe cache lookups since the last step; log
        compilations and fallbacks if configured."""


class RuntimeDiagnostics(Diagnostics):
    """Reads the runtime's totals after each step and after each warmed-up bucket.

    A launch is compiled when it is submitted. If the next plan is already submitted, its
    compilations count for the current step.
    """

    def __init__(
        self,
        runtime: RuntimeMetrics,
        config: ExecutionConfig,
        counters: Counters,
        *,
        counts_by_phase: bool,
    ) -> None:
        """`counts_by_phase`: count compilations by phase here, because GraphCache counts only
        captures. A step with both phases counts for the phase of its first launch."""
        self._runtime = runtime
        self._config = config
        self._counters = counters
        self._counts_by_phase = counts_by_phase
        self._recipes = (0, 0)
        self.reset()

    def reset(self) -> None:
        self._known_compilations = self._runtime.compilations()
        self._known_seconds = self._runtime.compile_seconds()
        self._num_details = len(self._runtime.compiled_recipes())
        self._known_fallbacks = dict(self._runtime.cpu_fallbacks())
        self._count_recipes()

    def warmed_up(self, phase: int) -> None:
        self._count_phase(phase, "warmup", self._runtime.compilations() - self._known_compilations)
        self.reset()

    def collected(self, output: AsyncStepOutput) -> None:
        total = self._runtime.compilations()
        compiled, self._known_compilations = total - self._known_compilations, total
        fallbacks = dict(self._runtime.cpu_fallbacks())
        new_fallbacks = {
            name: count - self._known_fallbacks.get(name, 0)
            for name, count in fallbacks.items()
            if count > self._known_fallbacks.get(name, 0)
        }
        self._known_fallbacks = fallbacks
        self._counters.add("recompilations", compiled)
        self._counters.add("cpu_fallbacks", sum(new_fallbacks.values()))
        if output.launches and output.launches[0].launch is not None:
            self._count_phase(output.launches[0].launch.phase, "serving", compiled)
        self._count_recipes()
        self._log(output, compiled, new_fallbacks)

    def _count_phase(self, phase: int, stage: str, compiled: int) -> None:
        if self._counts_by_phase and compiled:
            seconds = self._runtime.compile_seconds()
            self._counters.add(f"compilations.{phase_name(phase)}.{stage}", compiled)
            self._counters.add(f"compile_seconds.{stage}", seconds - self._known_seconds)
            self._known_seconds = seconds

    def _count_recipes(self) -> None:
        hits, misses = self._runtime.recipe_cache()
        self._counters.add("recipe_hits", hits - self._recipes[0])
        self._counters.add("recipe_misses", misses - self._recipes[1])
        self._recipes = (hits, misses)

    def _log(self, output: AsyncStepOutput, compiled: int, fallbacks: Mapping[str, int]) -> None:
        config = self._config
        if config.log_graph_compilation_all or (config.log_graph_compilation and compiled):
            logger.log(
                logging.WARNING if compiled else logging.INFO,
                "Step %d compiled %d graphs%s: %s",
                output.step,
                compiled,
                self._details(),
                _launches(output),
            )
        if config.log_cpu_fallbacks_all or (config.log_cpu_fallbacks and fallbacks):
            logger.log(
                logging.WARNING if fallbacks else logging.INFO,
                "Step %d ran %d operations on the host%s: %s",
                output.step,
                sum(fallbacks.values()),
                f" ({', '.join(f'{name} {n}' for name, n in sorted(fallbacks.items()))})"
                if fallbacks
                else "",
                _launches(output),
            )

    def _details(self) -> str:
        """Names and times of the recipes compiled since the last log line or `reset`."""
        recipes = self._runtime.compiled_recipes()
        new, self._num_details = recipes[self._num_details :], len(recipes)
        texts = [f"{name} {microseconds / 1e6:.1f} s" for name, microseconds in new]
        return f" ({', '.join(texts)})" if texts else ""


def _launches(output: AsyncStepOutput) -> str:
    launches = [launch.launch for launch in output.launches if launch.launch is not None]
    return ", ".join(
        f"{phase_name(launch.phase)} {launch.bucket} with {len(launch.req_indices)} requests"
        for launch in launches
    )
