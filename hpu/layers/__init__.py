"""Layers of the models: linear, embedding, attention and its metadata.

No back end and no kernel library.
"""
