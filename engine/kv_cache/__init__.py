"""KV-cache blocks: allocation, prefix cache and offloading.

Block ids only; the tensors are in hpu/runner/kv_cache.py.
"""
