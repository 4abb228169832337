"""Prometheus metrics of the API server and of the engine, and OpenTelemetry traces of requests."""
