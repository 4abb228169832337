"""Execution of a step's launches, for generation and for pooling, and the state, buffers, graphs
and caches of the execution."""
