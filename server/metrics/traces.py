"""OpenTelemetry traces of requests, exported over OTLP. Needs the extra `otel`. The span
llm_request and its gen_ai.request, usage and latency attributes have vLLM's names; the child spans
queue, prefill and decode are additional."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
    OTLPSpanExporter as GrpcExporter,
)
from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
    OTLPSpanExporter as HttpExporter,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from config.params.sampling import SamplingParams
from server.generation.outputs import Timing
from server.http.access_log import RequestRecord

logger = logging.getLogger(__name__)

HTTP_PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 5
MAX_QUEUED_SPANS = 2048
"""Maximum number of queued spans; further spans are dropped."""
FLUSH_S = 2.0
"""Time limit for exporting queued spans at shutdown."""
MAX_PATH = 200
FAILED_REASONS = frozenset(("abort", "error"))


class _Exporter(SpanExporter):
    """Exports spans; logs a line when the collector stops accepting spans, and when it accepts
    spans again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._is_lost = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_lost = result is not SpanExportResult.SUCCESS
        if is_lost and not self._is_lost:
            logger.warning(
                "The trace collector at %s does not accept spans: they are dropped until it does",
                self._endpoint,
            )
        elif self._is_lost and not is_lost:
            logger.info("The trace collector at %s accepts spans again", self._endpoint)
        self._is_lost = is_lost
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


class Tracer:
    """Creates a span for each finished request, with child spans for queue, prefill and decode. A
    thread exports the spans in batches, so an unreachable collector does not delay requests. Used
    on a single thread."""

    def __init__(self, endpoint: str, version: str) -> None:
        """`endpoint`: URL of a collector, over HTTP if the path ends in /v1/traces, otherwise over
        gRPC."""
        # Silence the exporter's loggers, which log each failed attempt.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter: SpanExporter
        if endpoint.rstrip("/").endswith(HTTP_PATH):
            exporter = HttpExporter(endpoint, timeout=EXPORT_TIMEOUT_S)
        else:
            exporter = GrpcExporter(
                endpoint, insecure=not endpoint.startswith("https://"), timeout=EXPORT_TIMEOUT_S
            )
        self._processor = BatchSpanProcessor(
            _Exporter(exporter, endpoint), max_queue_size=MAX_QUEUED_SPANS
        )
        # The SDK reads OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and OTEL_TRACES_SAMPLER.
        resource = Resource({"service.version": version}).merge(Resource.create())
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "gaudiserve"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("gaudiserve", version)
        self._propagator = TraceContextTextMapPropagator()

    def request_ended(
        self,
        record: RequestRecord,
        headers: Mapping[str, str],
        params: SamplingParams | None,
        timing: Timing,
        *,
        sent_s: float,
        num_sequences: int,
        num_cached_tokens: int,
    ) -> None:
        """Queue the spans of a request that has just finished. `sent_s`: time.perf_counter() when
        the request was sent to the engine. A `traceparent` in `headers` sets the parent trace."""
        now_s, now_ns = time.perf_counter(), time.time_ns()

        def unix_ns(seconds: float) -> int:
            return now_ns - int((now_s - seconds) * 1e9)

        parent = self._propagator.extract(headers, context.Context())
        span = self._tracer.start_span(
            "llm_request",
            parent,
            kind=SpanKind.SERVER,
            start_time=unix_ns(record.started_s),
            attributes={
                "gen_ai.request.id": record.id,
                "gen_ai.response.model": record.model or "",
                "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
                "gen_ai.usage.completion_tokens": record.num_output_tokens,
                "gen_ai.usage.num_sequences": num_sequences,
                "gen_ai.response.finish_reasons": record.finish_reasons.split(","),
                "gen_ai.latency.time_in_queue": timing.queue_s,
                "gen_ai.latency.time_in_model_prefill": timing.prefill_s,
                "gen_ai.latency.time_in_model_decode": timing.decode_s,
                "gen_ai.latency.time_in_model_inference": timing.prefill_s + timing.decode_s,
                "gen_ai.latency.e2e": now_s - record.started_s,
                "url.path": record.path[:MAX_PATH],
            },
        )
        if record.ttft_s is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", record.ttft_s)
        if params is not None:
            _set_parameters(span, params)
        if FAILED_REASONS & set(record.finish_reasons.split(",")):
            span.set_status(Status(StatusCode.ERROR, record.finish_reasons))
        inside = trace.set_span_in_context(span, context.Context())
        begin_s = sent_s
        for name, seconds, attributes in (
            ("queue", timing.queue_s, {}),
            (
                "prefill",
                timing.prefill_s,
                {
                    "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
                    "gaudiserve.cached_tokens": num_cached_tokens,
                },
            ),
            (
                "decode",
                timing.decode_s,
                {"gen_ai.usage.completion_tokens": record.num_output_tokens},
            ),
        ):
            child = self._tracer.start_span(
                name, inside, start_time=unix_ns(begin_s), attributes=attributes
            )
            begin_s += seconds
            child.end(unix_ns(begin_s))
        span.end(now_ns)

    def close(self) -> None:
        """Export the queued spans, within FLUSH_S."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH_S)


def _set_parameters(span: Span, params: SamplingParams) -> None:
    span.set_attribute("gen_ai.request.n", params.n)
    span.set_attribute("gen_ai.request.temperature", params.temperature)
    span.set_attribute("gen_ai.request.top_p", params.top_p)
    if params.max_tokens is not None:
        span.set_attribute("gen_ai.request.max_tokens", params.max_tokens)
