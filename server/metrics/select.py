"""Loads the tracer if tracing is configured, since OpenTelemetry is an optional extra."""

from importlib import import_module
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from config.errors import ConfigError
from config.version import install_command

if TYPE_CHECKING:
    from server.metrics.traces import Tracer


def make_tracer(endpoint: str | None, version: str) -> "Tracer | None":
    """The tracer for --otlp-traces-endpoint; None without this flag. Raises ConfigError."""
    if endpoint is None:
        return None
    try:
        parts = urlsplit(endpoint)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"--otlp-traces-endpoint is {endpoint!r}, it must be a URL such as "
            "http://localhost:4317 (gRPC) or http://localhost:4318/v1/traces (HTTP)"
        )
    try:
        traces = import_module("server.metrics.traces")
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): {install_command('otel')}"
        ) from error
    tracer: Tracer = traces.Tracer(endpoint, version)
    return tracer
