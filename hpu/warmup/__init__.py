"""Warm-up: bucket order, graph capture budget and log lines."""
