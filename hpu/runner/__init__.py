"""Launches: batch state, input buffers, graph cache, KV cache and async output, for generation and
for pooling. Sampling and warm-up have their own folders."""
