"""Warm-up: the order of buckets, graph capture, and what is reported of it."""
