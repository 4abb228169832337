"""Quantization methods of linear layers, experts and the KV cache, and the offline quantization of
checkpoints."""
