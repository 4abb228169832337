"""Prometheus metrics of the API server and of the engine."""
