"""StepStats: counters of the engine, and their snapshot for front ends."""

from engine.transport.messages import EngineStats

COMPILATIONS = "compilations."
"""A worker's counters: `compilations.<phase>.<warmup|serving>` since its start,
`compile_seconds.<warmup|serving>` their time; `graphs` and `graph_bytes` captured; and, counted by
the runtime, `recompilations`, `cpu_fallbacks` and `recipe_<hits|misses>`. Others are ignored."""
COMPILE_SECONDS = "compile_seconds."

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
        self.preemptions = 0
        self.steps = 0
        self.graphs = 0
        self.recompilations = 0
        self.cpu_fallbacks = 0
        self._recipes: dict[str, int] = {}
        self.graph_bytes = graph_bytes
        self._lookups: dict[str, int] = {}
        self._useful: dict[str, int] = {}
        self._padding: dict[str, int] = {}
        self._compilations: dict[str, int] = {}
        self._compile_seconds: dict[str, float] = {}
        self._step_tokens: list[int] = []
        self._step_seconds: list[tuple[int, float]] = []
        self._shapes: dict[tuple[str, tuple[int, int, int]], list[int]] = {}

    def count_launch(
        self, phase: str, result: str, useful: int, padded: int, shape: tuple[int, int, int]
    ) -> None:
        """Count a launch of `padded` tokens, `useful` of them real. `result` is that of the bucket
        lookup."""
        name, key = f"{phase}.{result}", (phase, shape)
        if key not in self._shapes and len(self._shapes) >= MAX_SHAPES:
            key = (phase, OTHERS)
        counts = self._shapes.setdefault(key, [0, 0, 0, 0])
        for index, count in enumerate((1, result == "hit", useful, padded - useful)):
            counts[index] += count
        self._lookups[name] = self._lookups.get(name, 0) + 1
        self._useful[phase] = self._useful.get(phase, 0) + useful
        self._padding[phase] = self._padding.get(phase, 0) + padded - useful

    def count_refusal(self, phase: str) -> None:
        """Count a sequence that was rejected because its launch would have to be compiled."""
        name = f"{phase}.refused"
        self._lookups[name] = self._lookups.get(name, 0) + 1

    def count_step(self, num_tokens: int, phases: list[int], seconds: list[float]) -> None:
        """Count a collected step: its tokens without padding, and each launch's phase and time."""
        self.steps += 1
        if len(self._step_tokens) >= MAX_SAMPLES:
            self._step_tokens.clear()
        if len(self._step_seconds) >= MAX_SAMPLES:
            self._step_seconds.clear()
        self._step_tokens.append(num_tokens)
        self._step_seconds.extend(zip(phases, seconds, strict=False))

    def update_counters(self, counters: dict[str, float]) -> None:
        """Take over the worker's changed counters."""
        for name, value in counters.items():
            if name.startswith(COMPILATIONS):
                self._compilations[name[len(COMPILATIONS) :]] = int(value)
            elif name.startswith(COMPILE_SECONDS):
                self._compile_seconds[name[len(COMPILE_SECONDS) :]] = value
            elif name == "recompilations":
                self.recompilations = int(value)
            elif name == "cpu_fallbacks":
                self.cpu_fallbacks = int(value)
            elif name in RECIPES:
                self._recipes[RECIPES[name]] = int(value)
            elif name == "graphs":
                self.graphs = int(value)
            elif name == "graph_bytes":
                self.graph_bytes = int(value)

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
        by_worker = sum(n for name, n in self._compilations.items() if name.endswith(".serving"))
        return max(by_worker, self.recompilations)

    def snapshot(
        self,
        *,
        running: int,
        waiting: int,
        waiting_prompt_tokens: int,
        blocks_used: int,
        blocks_total: int,
        sleep: str,
        with_samples: bool,
    ) -> EngineStats:
        """A copy, since another thread may encode it while the engine counts on. With
        `with_samples`, it takes the samples."""
        stats = EngineStats(
            running=running,
            waiting=waiting,
            waiting_prompt_tokens=waiting_prompt_tokens,
            blocks_used=blocks_used,
            blocks_total=blocks_total,
            sleep=sleep,
            preemptions=self.preemptions,
            steps=self.steps,
            lookups=self._lookups.copy(),
            useful_tokens=self._useful.copy(),
            padding_tokens=self._padding.copy(),
            compilations=self._compilations.copy(),
            compile_seconds=self._compile_seconds.copy(),
            recompilations=self.recompilations,
            cpu_fallbacks=self.cpu_fallbacks,
            recipes=self._recipes.copy(),
            graphs=self.graphs,
            graph_bytes=self.graph_bytes,
        )
        if with_samples:
            stats.step_tokens, self._step_tokens = self._step_tokens, []
            stats.step_seconds, self._step_seconds = self._step_seconds, []
        return stats
