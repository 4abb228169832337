"""Diagnostics: what a device's runtime counted during a step (compilations, operations that ran on
the host, its cache of recipes), as counters and log lines. Knows no runtime."""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from config.execution import ExecutionConfig
from hpu.backends.base import Backend
from hpu.profiling.counters import Counters, phase_name
from hpu.runner.async_output import AsyncStepOutput

logger = logging.getLogger(__name__)

RecipeCache = Callable[[], tuple[int, int]]
"""(hits, misses) since the process began."""


@runtime_checkable
class CountsWork(Protocol):
    """A back end whose runtime counts what a server should not do. Totals since the start."""

    def compilations(self) -> int: ...

    def compile_seconds(self) -> float: ...

    def cpu_fallbacks(self) -> Mapping[str, int]:
        """By operation."""
        ...


@runtime_checkable
class CountsRecipes(Protocol):
    """A back end with a cache of compiled recipes."""

    def recipe_cache(self) -> tuple[int, int]:
        """(hits, misses) since the start."""
        ...


class Diagnostics:
    """Looks at the runtime's totals after each step. With one plan ahead, what the step behind it
    caused may be told with this one: launches are compiled when they are made.

    None of the callables waits for the device.
    """

    def __init__(
        self,
        config: ExecutionConfig,
        counters: Counters,
        *,
        compilations: Callable[[], int],
        compile_seconds: Callable[[], float],
        cpu_fallbacks: Callable[[], Mapping[str, int]],
        recipe_cache: RecipeCache | None = None,
        counts_by_phase: bool = False,
    ) -> None:
        """`counts_by_phase`: nobody captures graphs, so that compilations are told by phase from
        here; those of a step with both phases are put down to its first launch."""
        self._counts_by_phase = counts_by_phase
        self._config = config
        self._counters = counters
        self._compilations = compilations
        self._compile_seconds = compile_seconds
        self._cpu_fallbacks = cpu_fallbacks
        self._recipe_cache = recipe_cache
        self._recipes = (0, 0)
        self.reset()

    def reset(self) -> None:
        """What was compiled until now was meant to be."""
        self._known_compilations = self._compilations()
        self._known_seconds = self._compile_seconds()
        self._known_fallbacks = dict(self._cpu_fallbacks())
        self._count_recipes()

    def warmed_up(self, phase: int) -> None:
        """A bucket of this phase was prepared."""
        self._count_phase(phase, "warmup", self._compilations() - self._known_compilations)
        self.reset()

    def collected(self, pending: AsyncStepOutput) -> None:
        """A step is done: count and log what happened since the one before it."""
        total = self._compilations()
        compiled, self._known_compilations = total - self._known_compilations, total
        fallbacks = dict(self._cpu_fallbacks())
        found = {
            name: count - self._known_fallbacks.get(name, 0)
            for name, count in fallbacks.items()
            if count > self._known_fallbacks.get(name, 0)
        }
        self._known_fallbacks = fallbacks
        self._counters.add("recompilations", compiled)
        self._counters.add("cpu_fallbacks", sum(found.values()))
        if pending.launches and pending.launches[0].launch is not None:
            self._count_phase(pending.launches[0].launch.phase, "serving", compiled)
        self._count_recipes()
        self._log(pending, compiled, found)

    def _count_phase(self, phase: int, stage: str, compiled: int) -> None:
        if self._counts_by_phase and compiled:
            seconds = self._compile_seconds()
            self._counters.add(f"compilations.{phase_name(phase)}.{stage}", compiled)
            self._counters.add(f"compile_seconds.{stage}", seconds - self._known_seconds)
            self._known_seconds = seconds

    def _count_recipes(self) -> None:
        if self._recipe_cache is None:
            return
        hits, misses = self._recipe_cache()
        self._counters.add("recipe_hits", hits - self._recipes[0])
        self._counters.add("recipe_misses", misses - self._recipes[1])
        self._recipes = (hits, misses)

    def _log(self, pending: AsyncStepOutput, compiled: int, fallbacks: Mapping[str, int]) -> None:
        config = self._config
        if config.log_graph_compilation_all or (config.log_graph_compilation and compiled):
            logger.log(
                logging.WARNING if compiled else logging.INFO,
                "Step %d compiled %d graphs: %s",
                pending.step,
                compiled,
                _launches(pending),
            )
        if config.log_cpu_fallbacks_all or (config.log_cpu_fallbacks and fallbacks):
            logger.log(
                logging.WARNING if fallbacks else logging.INFO,
                "Step %d ran %d operations on the host%s: %s",
                pending.step,
                sum(fallbacks.values()),
                f" ({', '.join(f'{name} {n}' for name, n in sorted(fallbacks.items()))})"
                if fallbacks
                else "",
                _launches(pending),
            )


def diagnostics_of(
    backend: Backend, config: ExecutionConfig, counters: Counters, *, captures: bool
) -> Diagnostics | None:
    """For a back end whose runtime counts; None for others. `captures`: graphs are captured, and
    counted by those who do."""
    if not isinstance(backend, CountsWork):
        return None
    return Diagnostics(
        config,
        counters,
        compilations=backend.compilations,
        compile_seconds=backend.compile_seconds,
        cpu_fallbacks=backend.cpu_fallbacks,
        recipe_cache=backend.recipe_cache if isinstance(backend, CountsRecipes) else None,
        counts_by_phase=not captures,
    )


def _launches(pending: AsyncStepOutput) -> str:
    asked = [launch.launch for launch in pending.launches if launch.launch is not None]
    return ", ".join(
        f"{phase_name(one.phase)} {one.bucket} with {len(one.req_indices)} rows" for one in asked
    )
