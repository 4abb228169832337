"""Quantization settings of checkpoints: a file per method, and registry.py, which maps
`quant_method` of config.json to its reader. hpu/quantization/ multiplies such weights."""
