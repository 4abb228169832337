"""The metrics of an API server, and the /metrics page.

Names are vLLM's: gateways, routers and dashboards have them built in.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from engine.client.base import EngineClient
from engine.transport.messages import EngineStats
from server.metrics.counters import Counter, Histogram, Registry, SharedSnapshots
from server.metrics.engine import EngineCollector

LABELS = ("model_name", "engine")
ENGINE = "0"
FINISH_REASONS = ("stop", "length", "abort", "error")
PREFIX_CACHES = ("vllm:prefix_cache", "vllm:gpu_prefix_cache")
"""The name, and vLLM's former name, which routers and dashboards still read."""
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

# generate_latest is untyped.
_encode_plain: Callable[..., bytes] = generate_latest
_encode_open: Callable[..., bytes] = openmetrics.generate_latest


def counts_up_to(maximum: int) -> list[float]:
    """1, 2, 5, 10, ... up to `maximum`."""
    steps: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > maximum:
                return steps or [1.0]
            steps.append(float(digit * power))
        power *= 10


class Metrics:
    """Counts requests, and writes the page over all API servers.

    With a `shared_folder`, each of several API servers writes its counts to it by `publish`, which
    must be called now and then, and any of them answers for all. Used on one thread.
    """

    def __init__(
        self,
        client: EngineClient,
        model_name: str,
        *,
        shared_folder: str | None = None,
        index: int = 0,
    ) -> None:
        """`index` is that of this API server."""
        self._labels = (model_name, ENGINE)
        self._shared = None if shared_folder is None else SharedSnapshots(shared_folder, index)
        self._registry = Registry()
        self._engine = EngineCollector(client, dict(zip(LABELS, self._labels, strict=True)))
        self._add_counters()
        self._add_times()
        http_labels = ("handler", "method", "status")
        self._http_requests = self._registry.counter(
            "http_requests", "HTTP requests by route template.", http_labels
        )
        self._http_seconds = self._registry.histogram(
            "http_request_duration_seconds",
            "HTTP request duration, up to the last byte.",
            http_labels,
            HTTP_S,
        )
        self._http_series: dict[tuple[str, ...], tuple[Counter, Histogram]] = {}
        self._sizes: dict[str, Histogram] = {}

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
        self._rejected_peers = self._counter(
            "gaudiserve:rejected_peers",
            "Connections to internal sockets that were closed for want of the launcher's token.",
        )
        self._finished = self._counters(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            "finished_reason",
            FINISH_REASONS,
        )
        self._rejections = self._counters(
            "vllm:admission_rejections", "Requests answered with 503.", "reason", REJECTIONS
        )

    def _add_times(self) -> None:
        def times(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            return self._histogram(f"vllm:{name}_seconds", text, bounds)

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
        self.queue_time = times("request_queue_time", "Spent in the waiting queue.", REQUEST_S)
        self.prefill_time = times("request_prefill_time", "Spent on the prompt.", REQUEST_S)
        self.decode_time = times("request_decode_time", "Spent after the first token.", REQUEST_S)
        self.inference_time = times("request_inference_time", "Prefill and decode.", REQUEST_S)

    def add_sizes(self, max_model_len: int) -> None:
        """Add the histograms whose buckets end at the context length, once that is known."""
        for name, text in (
            ("request_prompt_tokens", "Prompt tokens of a request."),
            ("request_generation_tokens", "Tokens generated for a sequence."),
            ("request_max_num_generation_tokens", "Tokens of a request's longest sequence."),
            ("request_params_n", "n of a request."),
            ("request_params_max_tokens", "max_tokens of a request."),
        ):
            largest = 128 if name == "request_params_n" else max_model_len
            self._sizes[name] = self._histogram(f"vllm:{name}", text, counts_up_to(largest))

    def prompt_processed(self, num_tokens: int, num_cached: int) -> None:
        """Count a request's prompt tokens, and how many of them were cached: once, whatever its n.

        The engine looks a prompt up for every choice, so its own count grows with n.
        """
        self._prompt_tokens.inc(num_tokens)
        self._cached_tokens.inc(num_cached)
        for queries, hits in zip(self._prefix_queries, self._prefix_hits, strict=True):
            queries.inc(num_tokens)
            hits.inc(num_cached)

    def observe_size(self, name: str, value: int) -> None:
        """Observe one request's `name`, e.g. request_prompt_tokens."""
        self._sizes[name].observe(value)

    def observe_stats(self, stats: EngineStats) -> None:
        """Take the samples of an engine's stats message; call once for each message."""
        self._engine.observe(stats)

    def sequence_ended(self, reason: str, count: int = 1) -> None:
        """Count sequences that ended by `reason`: stop, length, abort or error."""
        self._finished[reason].inc(count)

    def rejected(self, reason: str) -> None:
        """Count a 503 response: queue_full or not_ready."""
        self._rejections[reason].inc()

    def peer_rejected(self) -> None:
        """Count a connection to an internal socket that did not present the launcher's token."""
        self._rejected_peers.inc()

    def http_answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a response that has ended. `route` is a template, to bound the label set."""
        labels = (route, method if method in METHODS else "OTHER", str(status))
        series = self._http_series.get(labels)
        if series is None:
            series = self._http_requests.labels(*labels), self._http_seconds.labels(*labels)
            self._http_series[labels] = series
        count, duration = series
        count.inc()
        duration.observe(seconds)

    def publish(self) -> None:
        """Let the other API servers, if any, see the present counts. Raises OSError."""
        if self._shared is not None:
            self._shared.publish(self._registry.snapshot())

    def page(self, accept: str) -> tuple[bytes, str]:
        """The text of /metrics and its content type, in the format that `accept` prefers."""
        # Another server that is scraped next then reports at least these counts.
        with contextlib.suppress(OSError):
            self.publish()
        version = openmetrics_version(accept)
        if version is None:
            return _encode_plain(self), f"{PLAIN}; version=0.0.4; charset=utf-8"
        # Anything but allow-utf-8 renames the samples of vllm:... but not their families.
        body = _encode_open(self, openmetrics.ALLOWUTF8, version)
        return body, f"{OPENMETRICS}; version={version}; charset=utf-8"

    def collect(self) -> Iterator[Metric]:
        """All metrics, for prometheus_client's encoders."""
        yield from self._registry.collect(() if self._shared is None else self._shared.others())
        yield from self._engine.collect()

    def _counter(self, name: str, text: str) -> Counter:
        return self._registry.counter(name, text, LABELS).labels(*self._labels)

    def _counters(
        self, name: str, text: str, label: str, values: Sequence[str]
    ) -> dict[str, Counter]:
        """One counter for each value of `label`, present from the first scrape on, so that a rate
        over them is never empty."""
        family = self._registry.counter(name, text, (*LABELS, label))
        return {value: family.labels(*self._labels, value) for value in values}

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        return self._registry.histogram(name, text, LABELS, bounds).labels(*self._labels)


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
