"""The configuration of a checkpoint: architecture, sizes, rope, quantization, vision and pooling.

Read from config.json and the files next to it, without weights.
"""
