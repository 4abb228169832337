"""Reference implementations of the device's fused operations on CPU tensors, their fakes for
tracing, and the rules of the compile back end's partitioner."""
