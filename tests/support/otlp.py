"""Collectors of OpenTelemetry traces in this process, over gRPC and over HTTP."""

import contextlib
import gzip
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from waits import WAIT_S


class Collected:
    """Received spans, as protobuf messages."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []

    def take(self, request: Any) -> None:
        for resource in request.resource_spans:
            self.resources.append(attributes(resource.resource))
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def wait(self, count: int, timeout_s: float = WAIT_S) -> None:
        """Wait until `count` spans have arrived."""
        end = time.monotonic() + timeout_s
        while len(self.spans) < count:
            assert time.monotonic() < end, f"{len(self.spans)} of {count} spans"
            time.sleep(0.02)


def attributes(message: Any) -> dict[str, Any]:
    """Attributes of a span or a resource as plain values."""
    found = {}
    for pair in message.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        if kind == "array_value":
            value = [item.string_value for item in value.values]
        found[pair.key] = value
    return found


@contextlib.contextmanager
def grpc_collector() -> Iterator[Collected]:
    collected = Collected()

    class Service(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collected.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Service(), server)  # type: ignore[no-untyped-call]
    collected.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collected
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def http_collector() -> Iterator[Collected]:
    collected = Collected()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collected.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    collected.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        yield collected
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
