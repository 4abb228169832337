"""Resolves a model name (hub id, GGUF file, demo model) to a local folder. Also checks tensor
shapes against config.json before torch is imported, and reads model metadata without the
weights."""
