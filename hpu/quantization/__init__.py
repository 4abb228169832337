"""Quantization methods: how the weights of linear layers and experts are created, converted after
loading, and multiplied.

Device kernels live in hpu/backends/: a backend installs them in the layers.
"""
