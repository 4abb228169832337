"""Methods: how the weights of a linear layer, and of experts, are created, converted after loading
and multiplied.

The kernels of a device are not here: a back end gives them to the layers (hpu/backends/).
"""
