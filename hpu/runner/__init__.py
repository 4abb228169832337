"""Launches: batch state, input buffers, graph cache, KV cache, async output.

For generation and for pooling; sampling and warm-up have folders of their own.
"""
