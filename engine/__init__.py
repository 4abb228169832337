"""The engine process: scheduling, KV blocks, prefix cache and grammars over token ids.

No text, no HTTP and no tensors. The state of a request and the counters are here, as several
folders use them.
"""
