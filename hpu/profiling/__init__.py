"""Counters, runtime diagnostics and Chrome traces of a worker."""
