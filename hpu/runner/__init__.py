"""One launch after the other: batch state, input buffers, graphs, KV cache, async output."""
