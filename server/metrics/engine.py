"""Metrics of the engine, from its latest stats.

All API servers receive the same stats, so each can report them alone and nothing is counted twice.
"""

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from engine.client.base import EngineClient
from engine.transport.messages import ASLEEP, AWAKE, LATER, EngineStats
from server.metrics.counters import Histogram, add_series

WARMUP = "warmup"
"""Progress stage before Ready that counts buckets."""
PHASES = ("prefill", "decode")
RESULTS = ("hit", "miss", "fallback", "refused")
STAGES = ("warmup", "serving")
STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
COMPILE_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)


class EngineCollector:
    """Creates the metric families at each scrape."""

    def __init__(self, client: EngineClient, labels: Mapping[str, str]) -> None:
        self._client = client
        self._names = list(labels)
        self._values = list(labels.values())
        self._iteration_tokens = Histogram(TOKENS)
        self._step_seconds = [Histogram(STEP_S) for _ in PHASES]
        self._compile_seconds = {stage: Histogram(COMPILE_S) for stage in STAGES}
        self._compiled = dict.fromkeys(STAGES, (0, 0.0))
        """By stage: number of observed compilations, and their seconds."""
        try:
            self._torch = version("torch")
        except PackageNotFoundError:
            self._torch = ""

    def observe(self, stats: EngineStats) -> None:
        """Take the samples of one stats message."""
        for num_tokens in stats.step_tokens:
            self._iteration_tokens.observe(num_tokens)
        for phase, seconds in stats.step_seconds:
            self._step_seconds[phase].observe(seconds)
        for stage in STAGES:
            self._observe_compilations(stage, stats)

    def _observe_compilations(self, stage: str, stats: EngineStats) -> None:
        """Observe compilations since the last stats. Only the sum of their times is known: several
        at once, as in warm-up, count as equally long."""
        count = sum(stats.compilations.get(f"{phase}.{stage}", 0) for phase in PHASES)
        seconds = stats.compile_seconds.get(stage, 0.0)
        before, seconds_before = self._compiled[stage]
        if count > before and seconds > seconds_before:
            mean_s = (seconds - seconds_before) / (count - before)
            self._compile_seconds[stage].observe(mean_s, count - before)
            self._compiled[stage] = (count, seconds)

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats
        yield from self._queue(stats)
        yield self._sleep(stats)
        yield from self._cache(stats)
        yield from self._launches(stats)
        yield from self._device(stats)
        yield from self._warmup()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _info(self, name: str, text: str, facts: Mapping[str, str]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._names, *facts])
        family.add_metric([*self._values, *facts.values()], 1)
        return family

    def _queue(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Sequences in the batch.", stats.running)
        yield self._gauge(
            "vllm:num_requests_waiting", "Sequences in the waiting queue.", stats.waiting
        )
        yield self._counter("vllm:num_preemptions", "Preempted sequences.", stats.preemptions)
        tokens = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens computed in a step.", labels=self._names
        )
        add_series(tokens, self._values, TOKENS, self._iteration_tokens.values)
        yield tokens

    def _sleep(self, stats: EngineStats) -> Metric:
        family = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "1 for the state that the engine is in: awake, or asleep at level 1 or 2.",
            labels=[*self._names, "sleep_state"],
        )
        state = stats.sleep if stats.sleep in ASLEEP else AWAKE
        for name in (AWAKE, *ASLEEP):
            family.add_metric([*self._values, name], state == name)
        return family

    def _cache(self, stats: EngineStats) -> Iterator[Metric]:
        usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        text = "Share of the KV blocks in use, 0 to 1."
        yield self._gauge("vllm:kv_cache_usage_perc", text, usage)
        yield self._gauge("vllm:gpu_cache_usage_perc", text, usage)
        ready = self._client.ready
        if ready is not None:
            yield self._info(
                "vllm:cache_config_info",
                "The paged KV cache.",
                {"block_size": str(ready.block_size), "num_gpu_blocks": str(ready.num_blocks)},
            )

    def _launches(self, stats: EngineStats) -> Iterator[Metric]:
        lookups = CounterMetricFamily(
            "hpu_bucket_lookups",
            "Launches by whether their padded shape was warmed up.",
            labels=[*self._names, "phase", "result"],
        )
        compilations = CounterMetricFamily(
            "hpu_graph_compilations",
            "Graphs compiled; while serving each is a latency spike.",
            labels=[*self._names, "phase", "stage"],
        )
        useful = CounterMetricFamily(
            "hpu_useful_tokens", "Tokens computed that were real.", labels=[*self._names, "phase"]
        )
        padding = CounterMetricFamily(
            "hpu_padding_tokens", "Tokens computed as padding.", labels=[*self._names, "phase"]
        )
        steps = HistogramMetricFamily(
            "hpu_step_seconds", "A forward pass with sampling.", labels=[*self._names, "phase"]
        )
        for number, phase in enumerate(PHASES):
            labels = [*self._values, phase]
            for result in RESULTS:
                lookups.add_metric([*labels, result], stats.lookups.get(f"{phase}.{result}", 0))
            for stage in STAGES:
                count = stats.compilations.get(f"{phase}.{stage}", 0)
                compilations.add_metric([*labels, stage], count)
            useful.add_metric(labels, stats.useful_tokens.get(phase, 0))
            padding.add_metric(labels, stats.padding_tokens.get(phase, 0))
            add_series(steps, labels, STEP_S, self._step_seconds[number].values)
        yield from self._padding_ratio(stats)
        yield from self._runtime(stats)
        compile_seconds = HistogramMetricFamily(
            "hpu_graph_compile_seconds", "Time to compile a graph.", labels=[*self._names, "stage"]
        )
        for stage, histogram in self._compile_seconds.items():
            add_series(compile_seconds, [*self._values, stage], COMPILE_S, histogram.values)
        yield from (lookups, compilations, useful, padding, steps, compile_seconds)

    def _padding_ratio(self, stats: EngineStats) -> Iterator[Metric]:
        """The ratio of two counters, for dashboards that cannot divide."""
        family = GaugeMetricFamily(
            "hpu_padding_ratio",
            "Share of the computed tokens that were padding, since the start.",
            labels=[*self._names, "phase"],
        )
        for phase in PHASES:
            padding = stats.padding_tokens.get(phase, 0)
            computed = padding + stats.useful_tokens.get(phase, 0)
            family.add_metric([*self._values, phase], padding / computed if computed else 0.0)
        yield family

    def _runtime(self, stats: EngineStats) -> Iterator[Metric]:
        """Counters of the device runtime; zero without one."""
        yield self._counter(
            "hpu_recompilations",
            "Compilations after warm-up that the device's runtime counted.",
            stats.recompilations,
        )
        yield self._counter(
            "hpu_cpu_fallbacks",
            "Operations of the device that ran on the host after warm-up.",
            stats.cpu_fallbacks,
        )
        recipes = CounterMetricFamily(
            "hpu_recipe_cache_lookups",
            "Lookups in the runtime's cache of compiled recipes.",
            labels=[*self._names, "result"],
        )
        for result in ("hit", "miss"):
            recipes.add_metric([*self._values, result], stats.recipes.get(result, 0))
        yield recipes

    def _device(self, stats: EngineStats) -> Iterator[Metric]:
        ready = self._client.ready
        weights = kv = total = 0
        device = driver = software = ""
        if ready is not None:
            weights, kv, total = ready.weight_bytes, ready.kv_bytes, ready.total_bytes
            device, driver, software = ready.device, ready.driver, ready.software
        if stats.sleep in ASLEEP:
            kv = 0
            keeps_weights = device == "cpu" and stats.sleep == ASLEEP[0]
            weights = weights if keeps_weights else 0
        yield self._gauge("hpu_graphs_cached", "Captured graphs.", stats.graphs)
        yield self._gauge("hpu_graph_memory_bytes", "Held by graphs.", stats.graph_bytes)
        for name, text, value in (
            ("hpu_memory_used_bytes", "Weights, KV cache and graphs.", weights + kv),
            ("hpu_memory_total_bytes", "Memory of the device.", total),
            ("hpu_kv_cache_bytes", "The KV cache.", kv),
            ("hpu_weights_bytes", "The weights.", weights),
        ):
            if name == "hpu_memory_used_bytes":
                value += stats.graph_bytes
            family = GaugeMetricFamily(name, text, labels=[*self._names, "device"])
            family.add_metric([*self._values, "0"], value)
            yield family
        yield self._info(
            "hpu_info",
            "What this server runs on.",
            {"device": device, "driver": driver, "software": software, "torch": self._torch},
        )

    def _warmup(self) -> Iterator[Metric]:
        ready, progress = self._client.ready, self._client.progress
        done = total = 0
        stage = WARMUP if ready is None else LATER
        if progress is not None and progress.stage == stage:
            done, total = progress.done, progress.total
        elif ready is not None:
            done = total = ready.num_buckets
        yield self._gauge("hpu_warmup_seconds", "Warm-up.", ready.warmup_s if ready else 0.0)
        buckets = GaugeMetricFamily(
            "hpu_warmup_buckets", "Buckets warmed up.", labels=[*self._names, "state"]
        )
        buckets.add_metric([*self._values, "done"], done)
        buckets.add_metric([*self._values, "total"], total)
        yield buckets
