"""Quantization settings of checkpoints: a file per method, and registry.py, which maps
`quant_method` in config.json to its reader. The quantized layers are in hpu/quantization/."""
