"""Quantization settings of checkpoints. registry.py maps `quant_method` in config.json to its
reader."""
