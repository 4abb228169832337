"""Warm-up: order of buckets, graph capture and log lines."""
