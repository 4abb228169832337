"""KV-cache blocks: allocation, reference counts, eviction, prefix hashes.

Block ids only; the tensors are in hpu/runner/kv_cache.py.
"""
