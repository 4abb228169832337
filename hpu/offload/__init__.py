"""KV blocks outside the device: copies to host memory and back, and files of them.

Which block goes where is the engine's decision (engine/kv_cache/offload.py).
"""
