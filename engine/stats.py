"""StepStats: counters of the engine, and snapshots for front ends."""

from typing import Any

import msgspec

from engine.transport.messages import EngineStats

COMPILATIONS = "compilations."
"""Prefix of worker counters: `compilations.<phase>.<warmup|serving>` since the worker's start.
Other counters: SPEC_DECODE; `compile_seconds.<warmup|serving>`; captured `graphs` and
`graph_bytes`; and, from the runtime, `recompilations`, `cpu_fallbacks` and `recipe_<hits|misses>`.
Unknown names are ignored."""
COMPILE_SECONDS = "compile_seconds."
SPEC_DECODE = "spec_decode."
"""Prefix of `spec_decode.num_<drafts|draft_tokens|accepted_tokens>` and of
`spec_decode.accepted.<position>`, the accepted draft tokens at each draft position."""

COUNTERS = ("recompilations", "cpu_fallbacks", "graphs", "graph_bytes")
RECIPES = {"recipe_hits": "hit", "recipe_misses": "miss"}

MAX_SAMPLES = 4096
"""Number of samples between two snapshots from which the next step clears the list."""

PHASES = ("prefill", "decode")
"""Names of hpu.protocol.PREFILL and DECODE, indexed by their numbers."""

MAX_SHAPES = 512
"""Launch shapes that are counted separately; all further shapes of a phase share a count."""

OTHERS = (0, 0, 0)


class StepStats:
    """Counts since the start, and samples since the last snapshot."""

    def __init__(self, *, graph_bytes: int = 0) -> None:
        self.counts = EngineStats(graph_bytes=graph_bytes)
        """All counters; the scheduler's gauges are added by `snapshot`."""
        self._shapes: dict[tuple[str, tuple[int, int, int]], list[int]] = {}

    def count_launch(
        self, phase: str, result: str, useful: int, padded: int, shape: tuple[int, int, int]
    ) -> None:
        """Count a launch of `padded` tokens, including `useful` real tokens. `result`: result of
        the bucket lookup."""
        name, key = f"{phase}.{result}", (phase, shape)
        if key not in self._shapes and len(self._shapes) >= MAX_SHAPES:
            key = (phase, OTHERS)
        sums = self._shapes.setdefault(key, [0, 0, 0, 0])
        for index, count in enumerate((1, result == "hit", useful, padded - useful)):
            sums[index] += count
        counts = self.counts
        counts.lookups[name] = counts.lookups.get(name, 0) + 1
        counts.useful_tokens[phase] = counts.useful_tokens.get(phase, 0) + useful
        counts.padding_tokens[phase] = counts.padding_tokens.get(phase, 0) + padded - useful

    def count_padding(self, phase: str, padding: int) -> None:
        """Count padding tokens that a launch computes only because other engines launch."""
        counts = self.counts.padding_tokens
        counts[phase] = counts.get(phase, 0) + padding

    def count_refusal(self, phase: str) -> None:
        """Count a sequence that was rejected because its launch would need a compilation."""
        name = f"{phase}.refused"
        self.counts.lookups[name] = self.counts.lookups.get(name, 0) + 1

    def count_step(self, num_tokens: int, phases: list[int], seconds: list[float]) -> None:
        """Count a collected step: its tokens (OutputProcessor.num_step_tokens), and the phase
        and seconds of each launch. A step without tokens, such as a prompt chunk, adds no token
        sample."""
        counts = self.counts
        counts.steps += 1
        if len(counts.step_tokens) >= MAX_SAMPLES:
            counts.step_tokens.clear()
        if len(counts.step_seconds) >= MAX_SAMPLES:
            counts.step_seconds.clear()
        if num_tokens:
            counts.step_tokens.append(num_tokens)
        counts.step_seconds.extend(zip(phases, seconds, strict=False))

    def update_counters(self, counters: dict[str, float]) -> None:
        """Update worker counters from `counters`, the changed values."""
        for name, value in counters.items():
            if name.startswith(COMPILATIONS):
                self.counts.compilations[name[len(COMPILATIONS) :]] = int(value)
            elif name.startswith(COMPILE_SECONDS):
                self.counts.compile_seconds[name[len(COMPILE_SECONDS) :]] = value
            elif name in RECIPES:
                self.counts.recipes[RECIPES[name]] = int(value)
            elif name.startswith(SPEC_DECODE):
                self.counts.spec_decode[name[len(SPEC_DECODE) :]] = int(value)
            elif name in COUNTERS:
                setattr(self.counts, name, int(value))

    @property
    def shapes(self) -> list[tuple[str, int, int, int, int, int, int, int]]:
        """(phase, batch, query, blocks; launches, hits, useful tokens, padding) of each launched
        shape; see hpu.protocol.Launch. Shapes beyond MAX_SHAPES are summed under sizes 0."""
        return [
            (phase, *shape, counts[0], counts[1], counts[2], counts[3])
            for (phase, shape), counts in self._shapes.items()
        ]

    @property
    def num_compiled(self) -> int:
        """Compilations after warm-up: the larger of the worker's and the runtime's counts."""
        compilations = self.counts.compilations
        by_worker = sum(n for name, n in compilations.items() if name.endswith(".serving"))
        return max(by_worker, self.counts.recompilations)

    def snapshot(self, *, with_samples: bool, **gauges: Any) -> EngineStats:
        """Copy of the counters with the scheduler's gauges. The copy can be encoded on another
        thread while the engine keeps counting. `with_samples`: move the samples into the copy."""
        counts = self.counts
        stats = msgspec.structs.replace(
            counts,
            lookups=counts.lookups.copy(),
            useful_tokens=counts.useful_tokens.copy(),
            padding_tokens=counts.padding_tokens.copy(),
            compilations=counts.compilations.copy(),
            compile_seconds=counts.compile_seconds.copy(),
            recipes=counts.recipes.copy(),
            spec_decode=counts.spec_decode.copy(),
            **gauges,
        )
        taken = counts if with_samples else stats
        taken.step_tokens, taken.step_seconds = [], []
        return stats
