"""Weights from checkpoint files into parameters, and how large a model will be."""
