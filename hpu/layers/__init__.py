"""Layers of the models: linear, embedding, mixture of experts, attention and its metadata.

No back end and no kernel library.
"""
