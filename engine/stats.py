"""StepStats: counters of the engine, and their snapshot for front ends."""

from typing import Any

import msgspec

from engine.transport.messages import EngineStats

COMPILATIONS = "compilations."
"""A worker's counters: `compilations.<phase>.<warmup|serving>` since its start,
`compile_seconds.<warmup|serving>` their time; `graphs` and `graph_bytes` captured; and, counted by
the runtime, `recompilations`, `cpu_fallbacks` and `recipe_<hits|misses>`. Others are ignored."""
COMPILE_SECONDS = "compile_seconds."
SPEC_DECODE = "spec_decode."
"""`spec_decode.num_<drafts|draft_tokens|accepted_tokens>`, and `spec_decode.accepted.<position>` of
drafts."""

COUNTERS = ("recompilations", "cpu_fallbacks", "graphs", "graph_bytes")
RECIPES = {"recipe_hits": "hit", "recipe_misses": "miss"}

MAX_SAMPLES = 4096
"""Samples between two snapshots; if there are more, older ones are dropped."""

PHASES = ("prefill", "decode")
"""By number: hpu.protocol.PREFILL and DECODE."""

MAX_SHAPES = 512
"""Launch shapes that are counted separately; all others are counted as one."""

OTHERS = (0, 0, 0)


class StepStats:
    """Counts since the start, and samples since the last snapshot."""

    def __init__(self, *, graph_bytes: int = 0) -> None:
        self.counts = EngineStats(graph_bytes=graph_bytes)
        """All but the gauges of the scheduler."""
        self._shapes: dict[tuple[str, tuple[int, int, int]], list[int]] = {}

    def count_launch(
        self, phase: str, result: str, useful: int, padded: int, shape: tuple[int, int, int]
    ) -> None:
        """Count a launch of `padded` tokens, `useful` of them real. `result` is that of the bucket
        lookup."""
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
        """Count tokens of padding that a launch computes for other engines."""
        counts = self.counts.padding_tokens
        counts[phase] = counts.get(phase, 0) + padding

    def count_refusal(self, phase: str) -> None:
        """Count a sequence that was rejected because its launch would have to be compiled."""
        name = f"{phase}.refused"
        self.counts.lookups[name] = self.counts.lookups.get(name, 0) + 1

    def count_step(self, num_tokens: int, phases: list[int], seconds: list[float]) -> None:
        """Count a collected step: its tokens (OutputProcessor.num_step_tokens), and each launch's
        phase and time. A step without tokens is no sample: a part of a prompt, for example."""
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
        """Take over the worker's changed counters."""
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
        shape, as in hpu.protocol.Launch; the sizes of all shapes beyond MAX_SHAPES are 0."""
        return [
            (phase, *shape, counts[0], counts[1], counts[2], counts[3])
            for (phase, shape), counts in self._shapes.items()
        ]

    @property
    def num_compiled(self) -> int:
        """Compilations after warm-up, as the worker or the device's runtime counts them."""
        compilations = self.counts.compilations
        by_worker = sum(n for name, n in compilations.items() if name.endswith(".serving"))
        return max(by_worker, self.counts.recompilations)

    def snapshot(self, *, with_samples: bool, **gauges: Any) -> EngineStats:
        """A copy, with the scheduler's gauges, since another thread may encode it while the engine
        counts on. With `with_samples`, it takes the samples."""
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
