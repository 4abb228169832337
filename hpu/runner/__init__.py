"""Execution of a step's launches, for generation and for pooling: state of the requests, input
buffers, graphs, KV cache and results."""
