"""KV blocks outside the device: copies to host memory and back, and files of blocks.

The engine decides which block goes where (engine/kv_cache/offload.py).
"""
