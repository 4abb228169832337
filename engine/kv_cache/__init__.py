"""KV-cache blocks: allocation, reference counts, eviction, prefix hashes, offloading.

Block ids only; the tensors are in hpu/runner/kv_cache.py.
"""
