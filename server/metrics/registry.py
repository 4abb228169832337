"""Metrics of an API server, and the /metrics page. Metrics that vLLM also has keep vLLM's names,
because gateways, routers and dashboards expect them."""

import contextlib
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric, Sample
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from config.version import VERSION
from engine.client.base import EngineClient
from engine.client.router import REASONS
from engine.transport.messages import EngineStats
from server.http.body_bounds import decimal_number
from server.metrics.counters import Counter, Histogram, Registry, SharedSnapshots, Snapshot
from server.metrics.engine import EngineCollector
from server.metrics.processes import ProcessMemory
from server.metrics.requests import LABELS, RequestMetrics

ENGINE = "0"
"""Engine label of metrics of the API server, which belong to no engine."""
REJECTIONS = ("queue_full", "not_ready", "max_ttft")
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

PAUSE_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1200.0)
HTTP_S = (0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0)

IMAGE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
IMAGE_QUERIES, IMAGE_HITS = "vllm:mm_cache_queries", "vllm:mm_cache_hits"

OPENMETRICS = "application/openmetrics-text"
PLAIN = "text/plain"
OPENMETRICS_END = b"# EOF\n"

# generate_latest has no type annotations.
_encode_plain: Callable[..., bytes] = generate_latest
_encode_open: Callable[..., bytes] = openmetrics.generate_latest


PIECE_SAMPLES = 256
"""Maximum number of samples in a piece of a page; the piece takes about 3 ms. A metric may have
thousands of samples: one for each engine, route, status and bucket."""


class _Piece(NamedTuple):
    """Part of a metric's samples, for the encoders of prometheus_client."""

    metric: Metric
    samples: list[Sample]

    def collect(self) -> Iterator[Metric]:
        piece = copy(self.metric)
        piece.samples = self.samples
        yield piece


class Metrics:
    """Counts requests and renders the metrics page of all API servers.

    If `shared_folder` is set, `publish` writes the counts of this API server to the folder and must
    be called periodically; every API server renders the sum. Used on a single thread.
    """

    def __init__(
        self,
        client: EngineClient,
        model_name: str,
        *,
        shared_folder: str | None = None,
        index: int = 0,
        restart: int = 0,
    ) -> None:
        """`index`: index of this API server; `restart`: number of earlier servers with this
        index."""
        self._model_name = model_name
        self._is_first = index == 0
        self._shared = None
        self.processes = ProcessMemory(os.getpid(), "API server 0")
        if shared_folder is not None:
            self.processes = ProcessMemory(os.getppid(), "supervisor")
            self._shared = SharedSnapshots(shared_folder, index, restart)
        self._registry = Registry()
        self._engines = EngineCollector(client, model_name)
        engines = range(len(client.engines))
        self.requests = [RequestMetrics(self._registry, model_name, engine) for engine in engines]
        """Request metrics, by engine index."""
        self._add_counters(engines)
        self._add_restarts(engines)
        # Each replacement server counts 1, and the counts of all API servers are added.
        self._registry.counter(
            "gaudiserve:api_server_restarts",
            "API servers started in place of an API server that died.",
            LABELS,
        ).labels(model_name, ENGINE).inc(1 if restart else 0)
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

    def _add_counters(self, engines: Iterable[int]) -> None:
        self._rejected_peers = self._registry.counter(
            "gaudiserve:rejected_peers",
            "Connections to internal sockets that were closed without the launcher's token.",
            LABELS,
        ).labels(self._model_name, ENGINE)
        rejections = self._registry.counter(
            "vllm:admission_rejections",
            "Requests answered with 503.",
            (*LABELS, "reason"),
        )
        self._rejections = {
            reason: rejections.labels(self._model_name, ENGINE, reason) for reason in REJECTIONS
        }
        self._images = {
            name: self._registry.counter(name, text, LABELS).labels(self._model_name, ENGINE)
            for name, text in (
                (IMAGE_QUERIES, "Lookups in the cache of preprocessed images."),
                (IMAGE_HITS, "Images that were cached or already in work for the same client."),
            )
        }
        self._image_seconds = self._registry.histogram(
            "gaudiserve:image_preprocessing_seconds",
            "Time to decode and preprocess an image, with the wait for a process.",
            LABELS,
            IMAGE_S,
        ).labels(self._model_name, ENGINE)
        routed = self._registry.counter(
            "gaudiserve:routed_requests",
            "Sequences that the router sent to an engine, by the reason for the choice.",
            (*LABELS, "reason"),
        )
        self._routed = {
            (engine, reason): routed.labels(self._model_name, str(engine), reason)
            for engine in engines
            for reason in REASONS
        }

    def _add_restarts(self, engines: Iterable[int]) -> None:
        def counters(name: str, text: str) -> list[Counter]:
            family = self._registry.counter(name, text, LABELS)
            return [family.labels(self._model_name, str(engine)) for engine in engines]

        self._restarts = counters(
            "gaudiserve:engine_restarts", "Engines started in place of an engine that died."
        )
        self._resumed = counters(
            "gaudiserve:resumed_requests", "Sequences resumed after their engine died."
        )
        self._poison = counters(
            "gaudiserve:poison_requests",
            "Sequences failed because they repeatedly crashed engines.",
        )
        pauses = self._registry.histogram(
            "gaudiserve:engine_pause_seconds",
            "Time from an engine's death until its successor accepted requests.",
            LABELS,
            PAUSE_S,
        )
        self._pauses = [pauses.labels(self._model_name, str(engine)) for engine in engines]

    def engine_lost(self, engine: int, *, has_poison: bool) -> None:
        """Count a failed poison request of the crashed `engine` if `has_poison` is set."""
        self._poison[engine].inc(has_poison)

    def requests_resumed(self, engine: int, count: int) -> None:
        """Count resumed sequences of the crashed `engine`."""
        self._resumed[engine].inc(count)

    def engine_restored(self, engine: int, seconds: float) -> None:
        """Count an engine restart. All API servers notice it, but only the first one counts it."""
        if self._is_first:
            self._restarts[engine].inc()
            self._pauses[engine].observe(seconds)

    def add_sizes(self, max_model_len: int) -> None:
        """Add the histograms of request sizes. Call it when the context length is known, where
        most of their buckets end."""
        for requests in self.requests:
            requests.add_sizes(max_model_len)

    def observe_stats(self, engine: int, stats: EngineStats) -> None:
        """Record a stats message of an engine. Call it once per message."""
        self._engines.observe(engine, stats)

    def request_routed(self, engine: int, reason: str) -> None:
        """Count a sequence that the router sent to `engine`; `reason` is in router.REASONS."""
        self._routed[engine, reason].inc()

    def image_looked_up(self, is_hit: bool) -> None:
        """Count a lookup of an image or video in the cache of preprocessed images."""
        self._images[IMAGE_QUERIES].inc()
        if is_hit:
            self._images[IMAGE_HITS].inc()

    def image_processed(self, seconds: float) -> None:
        """Record how long the processing of an image or a video took, with waiting. See
        ImagePreprocessor.on_processed."""
        self._image_seconds.observe(seconds)

    def rejected(self, reason: str) -> None:
        """Count a request that failed with Overloaded before its response started. `reason` is in
        REJECTIONS."""
        self._rejections[reason].inc()

    def peer_rejected(self) -> None:
        """Count a connection to an internal socket without the launcher's token."""
        self._rejected_peers.inc()

    def http_answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a finished response. `route` is a template, to bound the number of label values."""
        labels = (route, method if method in METHODS else "OTHER", str(status))
        series = self._http_series.get(labels)
        if series is None:
            series = self._http_requests.labels(*labels), self._http_seconds.labels(*labels)
            self._http_series[labels] = series
        count, duration = series
        count.inc()
        duration.observe(seconds)

    def publish(self) -> None:
        """Publish the current counts to the other API servers, if any. Raises OSError."""
        if self._shared is not None:
            self._shared.publish(self._registry.snapshot())

    def page(self, accept: str) -> tuple[bytes, str]:
        """Text of /metrics and its content type, in the format that `accept` prefers."""
        pieces, content_type = self.pieces(accept)
        return b"".join(pieces), content_type

    def pieces(self, accept: str) -> tuple[Iterator[bytes], str]:
        """`page` with the text in pieces of up to PIECE_SAMPLES lines, which are generated one at a
        time."""
        version = openmetrics_version(accept)
        if version is None:
            return self._pieces(_encode_plain), f"{PLAIN}; version=0.0.4; charset=utf-8"
        # Escaping schemes other than allow-utf-8 would rename the samples of vllm:... but not their
        # families.
        encode = partial(_encode_open, escaping=openmetrics.ALLOWUTF8, version=version)
        pieces = self._pieces(encode, OPENMETRICS_END)
        return pieces, f"{OPENMETRICS}; version={version}; charset=utf-8"

    def _pieces(self, encode: Callable[..., bytes], end: bytes = b"") -> Iterator[bytes]:
        # Publish first, so that a server scraped next reports at least these counts.
        with contextlib.suppress(OSError):
            self.publish()
        others: list[Snapshot] = []
        for snapshot in () if self._shared is None else self._shared.others():
            others.append(snapshot)
            yield b""
        for metric in self._collect(others):
            head = encode(_Piece(metric, [])).removesuffix(end)
            yield head
            for start in range(0, len(metric.samples), PIECE_SAMPLES):
                piece = _Piece(metric, metric.samples[start : start + PIECE_SAMPLES])
                yield encode(piece).removeprefix(head).removesuffix(end)
        yield end

    def _collect(self, others: Sequence[Snapshot]) -> Iterator[Metric]:
        """All metrics; `others`: the counts of the other API servers."""
        yield from self._registry.collect(others)
        yield self._build_info()
        yield from self._engines.collect()
        yield self.processes.metric()

    def _build_info(self) -> Metric:
        """Gauge with the versions as labels. Its value is 1: it is not summed over API servers."""
        names = ("model_name", "version", "python")
        family = GaugeMetricFamily(
            "gaudiserve:build_info", "Versions of gaudiserve and of Python.", labels=names
        )
        family.add_metric((self._model_name, VERSION, platform.python_version()), 1.0)
        return family


MAX_ACCEPT_CHARACTERS = 1000
"""Maximum length of the Accept header that is parsed; scrapers send about 200 characters."""


def openmetrics_version(accept: str) -> str | None:
    """OpenMetrics version for the response; None for plain text."""
    best: tuple[float, str | None] = (0.0, None)
    for offer in accept[:MAX_ACCEPT_CHARACTERS].split(","):
        kind, *options = (part.strip() for part in offer.split(";"))
        values = dict(option.partition("=")[::2] for option in options)
        try:
            quality = decimal_number(values.get("q", "1"))
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
