"""Resolves a model's name to a local folder: hub, GGUF conversion, the demo model. Also compares
the tensors with config.json before torch is imported, and reads a model's facts without its
weights."""
