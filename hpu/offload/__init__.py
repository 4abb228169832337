"""KV blocks outside the device: copies to host memory and back, and files of blocks.

The engine decides where each block is kept (engine/kv_cache/offload.py).
"""
