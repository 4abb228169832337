"""Linear methods: how a linear layer's weight is created, converted after loading and multiplied.

The kernels of a device are not here: a back end gives them to the layers (hpu/backends/).
"""
