"""Warm-up: runs of buckets, captures of graphs, the order of both, and log lines."""
