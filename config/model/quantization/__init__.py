"""What a checkpoint says of its quantized weights: one file a method, and registry.py, which maps
`quant_method` of config.json to it.

How such weights are multiplied is not here (hpu/quantization/).
"""
