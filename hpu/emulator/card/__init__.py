"""The emulated card: tensors, ops, memory, streams, recipes and recorded graphs."""
