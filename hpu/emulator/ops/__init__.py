"""Reference implementations of the device's fused operations on CPU tensors."""
