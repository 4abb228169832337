"""Metrics of the engines, from their latest stats. All API servers receive the same stats, so each
of them reports the engines without summing."""

import functools
import time
from collections.abc import Collection, Iterator, Mapping

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from config.version import installed_version
from engine.client.base import EngineClient, SingleEngineClient
from engine.transport.messages import ASLEEP, AWAKE, BACKGROUND_WARMUP, EngineStats
from server.metrics.counters import Labels, Registry
from server.metrics.requests import LABELS

WARMUP = "warmup"
"""Start-up stage that counts warmed-up buckets."""
PHASES = ("prefill", "decode")
RESULTS = ("hit", "miss", "fallback", "refused")
STAGES = ("warmup", "serving")
STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
COMPILE_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


SPEC_DECODE = (
    ("num_drafts", "Drafts of one or more tokens, each of one request in one step."),
    ("num_draft_tokens", "Draft tokens that decodes verified."),
    ("num_accepted_tokens", "Draft tokens that were accepted."),
)
"""(key in EngineStats.spec_decode, help text)."""
RANK_GAUGES = (
    ("weight_bytes", "hpu_rank_weights_bytes", "Memory of a rank's weights."),
    ("kv_bytes", "hpu_rank_kv_cache_bytes", "Memory of a rank's KV cache."),
    ("graph_bytes", "hpu_rank_graph_memory_bytes", "Memory of a rank's graphs after the warm-up."),
    ("total_bytes", "hpu_rank_memory_total_bytes", "Memory of a rank's device."),
    ("warmup_compilations", "hpu_rank_warmup_compilations", "Graphs that its warm-up compiled."),
)
"""Gauges per worker of an engine with several workers: (field of RankFacts, metric name, help
text)."""


@functools.cache
def _torch_version() -> str:
    return installed_version("torch")


class EngineCollector:
    """Collector that builds the metric families of all engines at each scrape."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._histograms = Registry()
        self._engines = [
            _EngineMetrics(engine, (model_name, str(engine.engine)), self._histograms)
            for engine in client.engines
        ]

    def observe(self, engine: int, stats: EngineStats) -> None:
        """Record a stats message of `engine`."""
        self._engines[engine].observe(stats)

    def collect(self) -> Iterator[Metric]:
        yield from self._histograms.collect()
        families: dict[str, Metric] = {}
        for engine in self._engines:
            for family in engine.collect():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()


class _EngineMetrics:
    def __init__(self, engine: SingleEngineClient, labels: Labels, histograms: Registry) -> None:
        self._engine = engine
        self._values = labels
        self._iteration_tokens = histograms.histogram(
            "vllm:iteration_tokens_total",
            "Tokens that a step generated, and computed tokens of the prompts that it completed.",
            LABELS,
            TOKENS,
        ).labels(*labels)
        step_seconds = histograms.histogram(
            "hpu_step_seconds", "A forward pass with sampling.", (*LABELS, "phase"), STEP_S
        )
        self._step_seconds = [step_seconds.labels(*labels, phase) for phase in PHASES]
        compile_seconds = histograms.histogram(
            "hpu_graph_compile_seconds",
            "Time to compile a graph.",
            (*LABELS, "stage"),
            COMPILE_S,
        )
        self._compile_seconds = {stage: compile_seconds.labels(*labels, stage) for stage in STAGES}
        self._stats_s = time.monotonic()
        """Arrival time of the latest stats, in time.monotonic() seconds."""
        self._compiled = dict.fromkeys(STAGES, (0, 0.0))
        """Stage -> (number, total seconds) of the compilations observed so far."""

    def observe(self, stats: EngineStats) -> None:
        self._stats_s = time.monotonic()
        for num_tokens in stats.step_tokens:
            self._iteration_tokens.observe(num_tokens)
        for phase, seconds in stats.step_seconds:
            self._step_seconds[phase].observe(seconds)
        for stage in STAGES:
            self._observe_compilations(stage, stats)

    def _observe_compilations(self, stage: str, stats: EngineStats) -> None:
        """Observe the compilations since the last stats message. The stats have only the sum of
        their times, so each of several compilations is observed with the mean time."""
        count = sum(stats.compilations.get(f"{phase}.{stage}", 0) for phase in PHASES)
        seconds = stats.compile_seconds.get(stage, 0.0)
        before, seconds_before = self._compiled[stage]
        if count > before and seconds > seconds_before:
            mean_s = (seconds - seconds_before) / (count - before)
            self._compile_seconds[stage].observe(mean_s, count - before)
            self._compiled[stage] = (count, seconds)

    def collect(self) -> Iterator[Metric]:
        engine, stats = self._engine, self._engine.stats
        if not engine.is_alive:
            stats = msgspec.structs.replace(
                stats,
                running=0,
                waiting=0,
                waiting_prompt_tokens=0,
                prefilling_tokens=0,
                waiting_tenants=0,
                oldest_waiting_s=0.0,
                blocks_used=0,
            )
        is_up = engine.is_alive and engine.ready is not None
        yield self._gauge(
            "gaudiserve:engine_up",
            "1 while the engine has started and lives, also while it sleeps; else 0.",
            is_up,
        )
        if engine.ready is not None:
            yield self._gauge(
                "gaudiserve:engine_start_time_seconds",
                "Unix time at which the engine became ready.",
                engine.ready.ready_unix_s,
            )
        yield from self._queue(stats)
        yield from self._overload(stats)
        yield from self._cache(stats)
        if stats.max_loras:
            yield from self._adapters(stats)
        if stats.kv_offload:
            yield from self._offload(stats.kv_offload)
        yield from self._images(stats)
        yield from self._launches(stats)
        yield from self._speculation(stats.spec_decode)
        yield from self._device(stats)
        yield from self._warmup()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._gauges(name, text, (), {(): value})

    def _gauges(
        self,
        name: str,
        text: str,
        label_names: Labels,
        values: Mapping[Labels, float],
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily] = GaugeMetricFamily,
    ) -> Metric:
        family = kind(name, text, labels=[*LABELS, *label_names])
        for labels, value in values.items():
            family.add_metric([*self._values, *labels], value)
        return family

    def _counters(
        self, name: str, text: str, label_names: Labels, values: Mapping[Labels, float]
    ) -> Metric:
        return self._gauges(name, text, label_names, values, CounterMetricFamily)

    def _info(self, name: str, text: str, facts: Mapping[str, str]) -> Metric:
        return self._gauges(name, text, tuple(facts), {tuple(facts.values()): 1})

    def _queue(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Sequences in the batch.", stats.running)
        yield self._gauge(
            "vllm:num_requests_waiting", "Sequences in the waiting queue.", stats.waiting
        )
        # A stuck engine sends no stats while its requests keep waiting.
        silent_s = time.monotonic() - self._stats_s if stats.waiting else 0.0
        yield self._gauge(
            "gaudiserve:oldest_waiting_seconds",
            "Time since the arrival of the oldest waiting request.",
            stats.oldest_waiting_s + silent_s,
        )
        yield self._counters(
            "vllm:num_preemptions", "Preempted sequences.", (), {(): stats.preemptions}
        )
        state = stats.sleep if stats.sleep in ASLEEP else AWAKE
        yield self._gauges(
            "vllm:engine_sleep_state",
            "1 for the state that the engine is in: awake, or asleep at level 1 or 2.",
            ("sleep_state",),
            {(name,): state == name for name in (AWAKE, *ASLEEP)},
        )

    def _overload(self, stats: EngineStats) -> Iterator[Metric]:
        rate = stats.prefill_tokens_per_s
        yield self._gauge(
            "gaudiserve:prefill_tokens_per_second",
            "Mean rate at which prompt tokens leave the waiting queue; with --max-ttft.",
            rate,
        )
        ahead = stats.waiting_prompt_tokens + stats.prefilling_tokens
        yield self._gauge(
            "gaudiserve:expected_ttft_seconds",
            "Estimated time to first token of a new request at the end of the queue; with "
            "--max-ttft.",
            ahead / rate if rate else 0.0,
        )
        yield self._gauge(
            "gaudiserve:waiting_tenants",
            "API keys that have waiting requests; with --fair-share.",
            stats.waiting_tenants,
        )
        yield self._counters(
            "gaudiserve:tenant_tokens",
            "Tokens that an API key was served; with --fair-share.",
            ("tenant",),
            {(tenant,): count for tenant, count in stats.tenant_tokens.items()},
        )

    def _cache(self, stats: EngineStats) -> Iterator[Metric]:
        usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        text = "Share of the KV blocks in use, 0 to 1."
        yield self._gauge("vllm:kv_cache_usage_perc", text, usage)
        yield self._gauge("vllm:gpu_cache_usage_perc", text, usage)
        ready = self._engine.ready
        if ready is not None:
            num_tokens = ready.num_blocks * ready.block_size
            yield self._info(
                "vllm:cache_config_info",
                "The paged KV cache.",
                {
                    "block_size": str(ready.block_size),
                    "num_gpu_blocks": str(ready.num_blocks),
                    "kv_cache_size_tokens": str(num_tokens),
                    "kv_cache_max_concurrency": str(num_tokens / ready.max_model_len),
                },
            )

    def _offload(self, counts: Mapping[str, int]) -> Iterator[Metric]:
        block_bytes = counts["block_bytes"]
        for name, text in (
            ("stored", "KV blocks copied to host memory."),
            ("loaded", "KV blocks copied from host memory to the device."),
            ("fetched", "KV blocks read from files."),
            ("corrupt", "KV blocks with a wrong checksum; they were computed again."),
            ("missing", "KV blocks whose file did not exist; they were computed again."),
        ):
            yield self._counters(
                f"gaudiserve:kv_offload_{name}_blocks", text, (), {(): counts[name]}
            )
        yield self._counters(
            "gaudiserve:kv_offload_bytes",
            "Bytes of KV blocks copied to host memory and from it.",
            ("direction",),
            {
                ("out",): counts["stored"] * block_bytes,
                ("in",): counts["loaded"] * block_bytes,
            },
        )
        yield self._gauges(
            "gaudiserve:kv_offload_blocks",
            "KV blocks in host memory and in files.",
            ("place",),
            {("host",): counts["host_blocks"], ("files",): counts["file_blocks"]},
        )
        yield self._gauges(
            "gaudiserve:kv_offload_max_blocks",
            "KV blocks for which there is room in host memory and in files.",
            ("place",),
            {("host",): counts["max_host_blocks"], ("files",): counts["max_file_blocks"]},
        )

    def _adapters(self, stats: EngineStats) -> Iterator[Metric]:
        # Same format as in vLLM: the value is a timestamp, and the adapter names are labels.
        yield self._gauges(
            "vllm:lora_requests_info",
            "Adapters with running and with waiting requests; the value is the Unix time.",
            ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            {
                (
                    str(stats.max_loras),
                    ",".join(sorted(stats.lora_running)),
                    ",".join(sorted(stats.lora_waiting)),
                ): time.time()
            },
        )
        for name, text, count in (
            ("loads", "Adapters read to host memory.", stats.lora_loads),
            ("load_failures", "Adapters that could not be read.", stats.lora_load_failures),
            ("evictions", "Adapters dropped from host memory.", stats.lora_evictions),
        ):
            yield self._counters(f"gaudiserve:lora_{name}", text, (), {(): count})
        yield self._gauge(
            "gaudiserve:lora_bytes", "Size of the adapters in host memory.", stats.lora_bytes
        )

    def _images(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, count in (
            (
                "encoder_cache_queries",
                "Images of scheduled prompts that were looked up in the encoder cache.",
                stats.encoder_cache_queries,
            ),
            (
                "encoder_cache_hits",
                "Images whose embeddings were in the encoder cache.",
                stats.encoder_cache_hits,
            ),
            ("encoded_images", "Images that the vision tower encoded.", stats.encoded_images),
            (
                "encoded_image_tokens",
                "Embeddings that the vision tower made.",
                stats.encoded_image_tokens,
            ),
        ):
            yield self._counters(f"gaudiserve:{name}", text, (), {(): count})
        yield self._gauge(
            "gaudiserve:encoder_cache_tokens",
            "Embeddings of images in the encoder cache.",
            stats.encoder_cache_tokens,
        )

    def _launches(self, stats: EngineStats) -> Iterator[Metric]:
        phases: list[Labels] = [(phase,) for phase in PHASES]
        useful = {phase: stats.useful_tokens.get(phase[0], 0) for phase in phases}
        padding = {phase: stats.padding_tokens.get(phase[0], 0) for phase in phases}
        yield self._counters(
            "hpu_bucket_lookups",
            "Launches, by whether their padded shape was warmed up.",
            ("phase", "result"),
            {
                (phase, result): stats.lookups.get(f"{phase}.{result}", 0)
                for phase in PHASES
                for result in RESULTS
            },
        )
        yield self._counters(
            "hpu_graph_compilations",
            "Graphs compiled; while serving each is a latency spike.",
            ("phase", "stage"),
            {
                (phase, stage): stats.compilations.get(f"{phase}.{stage}", 0)
                for phase in PHASES
                for stage in STAGES
            },
        )
        yield self._counters(
            "hpu_useful_tokens", "Computed tokens without padding.", ("phase",), useful
        )
        yield self._counters(
            "hpu_padding_tokens", "Computed tokens of padding.", ("phase",), padding
        )
        # Ratio of two counters, for dashboards that cannot divide.
        yield self._gauges(
            "hpu_padding_ratio",
            "Share of the computed tokens that were padding, since the start.",
            ("phase",),
            {phase: padding[phase] / max(1, padding[phase] + useful[phase]) for phase in phases},
        )
        # Counters of the device runtime; 0 on devices without a runtime.
        yield self._counters(
            "hpu_recompilations",
            "Compilations after warm-up that the device's runtime counted.",
            (),
            {(): stats.recompilations},
        )
        yield self._counters(
            "hpu_cpu_fallbacks",
            "Operations of the device that ran on the host after warm-up.",
            (),
            {(): stats.cpu_fallbacks},
        )
        yield self._counters(
            "hpu_recipe_cache_lookups",
            "Lookups in the runtime's cache of compiled recipes.",
            ("result",),
            {(result,): stats.recipes.get(result, 0) for result in ("hit", "miss")},
        )

    def _speculation(self, counts: Mapping[str, int]) -> Iterator[Metric]:
        for name, text in SPEC_DECODE:
            value = counts.get(name, 0)
            yield self._counters(f"vllm:spec_decode_{name}", text, (), {(): value})
        prefix = "accepted."
        positions = sorted(int(n.removeprefix(prefix)) for n in counts if n.startswith(prefix))
        yield self._counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in the draft.",
            ("position",),
            {(str(position),): counts[f"{prefix}{position}"] for position in positions},
        )

    def _device(self, stats: EngineStats) -> Iterator[Metric]:
        ready = self._engine.ready
        weights = kv = total = 0
        device = driver = software = ""
        if ready is not None:
            weights, kv, total = ready.weight_bytes, ready.kv_bytes, ready.total_bytes
            device, driver, software = ready.device, ready.driver, ready.software
        freed: list[str] = []
        if stats.sleep in ASLEEP:
            kv, freed = 0, ["kv_bytes", "graph_bytes"]
            keeps_weights = device == "cpu" and stats.sleep == ASLEEP[0]
            if not keeps_weights:
                weights, freed = 0, [*freed, "weight_bytes"]
        used = weights + kv + stats.graph_bytes
        yield self._gauge("hpu_graphs_cached", "Captured graphs.", stats.graphs)
        yield self._gauge("hpu_graph_memory_bytes", "Memory of captured graphs.", stats.graph_bytes)
        for name, text, value in (
            ("hpu_memory_used_bytes", "Weights, KV cache and graphs.", used),
            ("hpu_memory_total_bytes", "Memory of the device.", total),
            ("hpu_kv_cache_bytes", "The KV cache.", kv),
            ("hpu_weights_bytes", "The weights.", weights),
        ):
            yield self._gauges(name, text, ("device",), {("0",): value})
        yield from self._ranks(freed)
        yield self._info(
            "hpu_info",
            "What this server runs on.",
            {"device": device, "driver": driver, "software": software, "torch": _torch_version()},
        )

    def _ranks(self, freed: Collection[str]) -> Iterator[Metric]:
        """Gauges per worker of an engine with several workers. `freed`: fields that are reported as
        0 while the engine sleeps."""
        ready = self._engine.ready
        ranks = () if ready is None else ready.ranks
        for field, name, text in RANK_GAUGES:
            values: dict[Labels, float] = {
                (str(rank.rank),): 0 if field in freed else getattr(rank, field) for rank in ranks
            }
            yield self._gauges(name, text, ("rank",), values)

    def _warmup(self) -> Iterator[Metric]:
        ready, progress = self._engine.ready, self._engine.progress
        done = total = 0
        stage = WARMUP if ready is None else BACKGROUND_WARMUP
        if progress is not None and progress.stage == stage:
            done, total = progress.done, progress.total
        elif ready is not None:
            done = total = ready.num_buckets
        yield self._gauge("hpu_warmup_seconds", "Warm-up.", ready.warmup_s if ready else 0.0)
        yield self._gauges(
            "hpu_warmup_buckets",
            "Buckets warmed up.",
            ("state",),
            {("done",): done, ("total",): total},
        )
