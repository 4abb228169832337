"""Layers of the models: linear, embedding, norms, MLP, mixture of experts, attention and its
metadata, and layers with a state.

Contains no back end and no kernel library.
"""
