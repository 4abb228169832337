"""Quantization methods: how the weights of linear layers and experts are created, converted after
loading, and multiplied.

Device kernels are in hpu/ops/ and hpu/native/: a backend installs them in the layers.
"""
