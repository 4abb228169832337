"""Prometheus: the names a front-end counts itself, and the page. Knows no request bodies.

Names are vLLM's, since gateways, routers and dashboards have them built in.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics import exposition as openmetrics

from engine.client.base import EngineClient
from engine.transport.messages import EngineStats
from server.metrics.engine import EngineCollector
from server.metrics.tally import BatchedCounter, BatchedHistogram

LABELS = ("model_name", "engine")
ENGINE = "0"
FINISH_REASONS = ("stop", "length", "abort", "error")
PREFIX_CACHES = ("vllm:prefix_cache", "vllm:gpu_prefix_cache")
"""The name, and the old one that routers and dashboards still read."""
REJECTIONS = ("queue_full", "not_ready")
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

_MINUTES = (160.0, 640.0, 2560.0)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
TTFT_S = (*_TTFT_S, 10.0, 20.0, 40.0, 80.0, *_MINUTES)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
TOKEN_S = (*_TOKEN_S, 10.0, 20.0, 40.0, 80.0, *_MINUTES)
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
REQUEST_S = (*_REQUEST_S, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
HTTP_S = (0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0)

OPENMETRICS = "application/openmetrics-text"
PLAIN = "text/plain"

# Untyped there.
_encode_plain: Callable[..., bytes] = generate_latest
_encode_open: Callable[..., bytes] = openmetrics.generate_latest


def counts_up_to(most: int) -> list[float]:
    """1, 2, 5, 10, ... up to `most`."""
    steps: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > most:
                return steps or [1.0]
            steps.append(float(digit * power))
        power *= 10


class Metrics:
    """What this front-end counts, and the page over all of its server.

    `shared_folder` holds the counts of every front-end when there are several: any of them then
    answers for all. The process must have been started for that (see `server.process.supervisor`).

    Fed on one thread. What is counted waits in plain numbers for `settle`, which `page` calls; with
    a `shared_folder` somebody else must too, now and then.
    """

    def __init__(
        self, client: EngineClient, model_name: str, *, shared_folder: str | None = None
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped there
        self._values = (model_name, ENGINE)
        self._shared_folder = shared_folder
        self._registry = CollectorRegistry(auto_describe=False)
        self._unsettled: list[BatchedCounter | BatchedHistogram] = []
        self._engine = EngineCollector(client, dict(zip(LABELS, self._values, strict=True)))
        self._add_counters()
        self._add_times()
        self._http_requests = Counter(
            "http_requests",
            "HTTP requests by route template.",
            ("handler", "method", "status"),
            registry=self._registry,
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "HTTP request duration, up to the last byte.",
            ("handler", "method", "status"),
            buckets=HTTP_S,
            registry=self._registry,
        )
        self._http: dict[tuple[str, str, str], tuple[BatchedCounter, BatchedHistogram]] = {}
        """By labels: of those that were answered."""
        self._sizes: dict[str, BatchedHistogram] = {}

    def _add_counters(self) -> None:
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests.")
        self._cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens that were found in the prefix cache."
        )
        self._prefix_queries = [
            self._counter(f"{name}_queries", "Prompt tokens looked up in the prefix cache.")
            for name in PREFIX_CACHES
        ]
        self._prefix_hits = [
            self._counter(f"{name}_hits", "Prompt tokens found in the prefix cache.")
            for name in PREFIX_CACHES
        ]
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests answered with 503.",
            (*LABELS, "reason"),
            registry=self._registry,
        )
        self._rejected_peers = self._counter(
            "gaudiserve:rejected_peers",
            "Connections to internal sockets that were closed for want of the launcher's token.",
        )
        # Present from the first scrape on, so that a rate over them is never empty.
        self._ended = {r: self._counted(self._success, r) for r in FINISH_REASONS}
        self._rejected = {r: self._counted(self._rejections, r) for r in REJECTIONS}

    def _add_times(self) -> None:
        def times(name: str, text: str, buckets: tuple[float, ...]) -> BatchedHistogram:
            return self._histogram(f"vllm:{name}_seconds", text, buckets)

        self.time_to_first_token = times(
            "time_to_first_token", "From the request's arrival to its first token.", TTFT_S
        )
        self.inter_token_latency = times(
            "inter_token_latency", "Between two deliveries of tokens to a sequence.", TOKEN_S
        )
        self.time_per_output_token = times(
            "request_time_per_output_token", "Mean over a request's tokens but the first.", TOKEN_S
        )
        self.e2e_latency = times("e2e_request_latency", "From arrival to the end.", REQUEST_S)
        self.queue_time = times("request_queue_time", "Spent in the waiting line.", REQUEST_S)
        self.prefill_time = times("request_prefill_time", "Spent on the prompt.", REQUEST_S)
        self.decode_time = times("request_decode_time", "Spent after the first token.", REQUEST_S)
        self.inference_time = times("request_inference_time", "Prefill and decode.", REQUEST_S)

    def add_sizes(self, max_model_len: int) -> None:
        """The histograms whose buckets end at the context, once that is known."""
        for name, text in (
            ("request_prompt_tokens", "Prompt tokens of a request."),
            ("request_generation_tokens", "Tokens generated for a sequence."),
            ("request_max_num_generation_tokens", "Tokens of a request's longest sequence."),
            ("request_params_n", "n of a request."),
            ("request_params_max_tokens", "max_tokens of a request."),
        ):
            most = 128 if name == "request_params_n" else max_model_len
            self._sizes[name] = self._histogram(f"vllm:{name}", text, counts_up_to(most))

    def prompt_processed(self, num_tokens: int, num_cached: int) -> None:
        """A request's prompt tokens, and how many of them were cached: once, whatever its n.

        The engine looks a prompt up for every choice, so its own count would grow with n.
        """
        self._prompt_tokens.inc(num_tokens)
        self._cached_tokens.inc(num_cached)
        for queries, hits in zip(self._prefix_queries, self._prefix_hits, strict=True):
            queries.inc(num_tokens)
            hits.inc(num_cached)

    def observe_size(self, name: str, value: int) -> None:
        """One request's `name`, e.g. request_prompt_tokens."""
        self._sizes[name].observe(value)

    def observe_stats(self, stats: EngineStats) -> None:
        """The samples that came with an engine's counters; every message's, exactly once."""
        self._engine.observe(stats)

    def sequence_ended(self, reason: str, count: int = 1) -> None:
        """`count` sequences ended: stop, length, abort or error."""
        self._ended[reason].inc(count)

    def rejected(self, reason: str) -> None:
        """A request got a 503: queue_full or not_ready."""
        self._rejected[reason].inc()

    def peer_rejected(self) -> None:
        """A connection to one of our own sockets did not present the launcher's token."""
        self._rejected_peers.inc()

    def http_answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """A response has ended. `route` is a template, so that the label set stays bounded."""
        labels = (route, method if method in METHODS else "OTHER", str(status))
        if labels not in self._http:
            count = BatchedCounter(self._http_requests.labels(*labels))
            times = BatchedHistogram(self._http_seconds.labels(*labels), HTTP_S)
            self._http[labels] = (count, times)
            self._unsettled += (count, times)
        count, times = self._http[labels]
        count.inc()
        times.observe(seconds)

    def settle(self) -> None:
        """Put all that was counted where it is read."""
        for one in self._unsettled:
            one.settle()

    def page(self, accept: str) -> tuple[bytes, str]:
        """The text of /metrics and its content type, in the form `accept` likes best."""
        self.settle()
        registry = self._registry
        if self._shared_folder is not None:
            registry = CollectorRegistry(auto_describe=False)
            MultiProcessCollector(registry, self._shared_folder)  # type: ignore[no-untyped-call]  # as above
        both = _Both(registry, self._engine)
        version = openmetrics_version(accept)
        if version is None:
            return _encode_plain(both), f"{PLAIN}; version=0.0.4; charset=utf-8"
        # Anything but allow-utf-8 renames the samples of vllm:... but not their families.
        body = _encode_open(both, openmetrics.ALLOWUTF8, version)
        return body, f"{OPENMETRICS}; version={version}; charset=utf-8"

    def _counter(self, name: str, text: str) -> BatchedCounter:
        return self._counted(Counter(name, text, LABELS, registry=self._registry))

    def _counted(self, counter: Counter, *labels: str) -> BatchedCounter:
        batched = BatchedCounter(counter.labels(*self._values, *labels))
        self._unsettled.append(batched)
        return batched

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...] | list[float]
    ) -> BatchedHistogram:
        histogram = Histogram(name, text, LABELS, buckets=buckets, registry=self._registry)
        batched = BatchedHistogram(histogram.labels(*self._values), buckets)
        self._unsettled.append(batched)
        return batched


class _Both:
    """A registry of requests and the engine's collector, as one page."""

    def __init__(self, registry: CollectorRegistry, engine: EngineCollector) -> None:
        self._parts = (registry, engine)

    def collect(self) -> Iterator[Metric]:
        for part in self._parts:
            yield from part.collect()


def openmetrics_version(accept: str) -> str | None:
    """The OpenMetrics version to answer with, or None for plain text."""
    best: tuple[float, str | None] = (0.0, None)
    for offer in accept.split(","):
        kind, *options = (part.strip() for part in offer.split(";"))
        values = dict(option.partition("=")[::2] for option in options)
        try:
            quality = float(values.get("q", "1"))
        except ValueError:
            continue
        version = None
        if kind == OPENMETRICS:
            version = values.get("version", "1.0.0")
            if version not in ("1.0.0", "0.0.1"):
                continue
        elif kind not in (PLAIN, "text/*", "*/*"):
            continue
        if quality > best[0]:
            best = (quality, version)
    return best[1]
