"""Weights from checkpoint files into parameters, and how much memory a model needs."""
