"""Quantization methods of linear layers, experts and the KV cache, and the offline quantization of
checkpoints.

Device kernels are in hpu/ops/ and hpu/native/: a backend installs them in the layers.
"""
