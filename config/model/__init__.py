"""What a checkpoint says of itself: architecture, sizes, rope, pooling.

Read from config.json and the files beside it; no tensors.
"""
