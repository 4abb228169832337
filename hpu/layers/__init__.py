"""Layers of the models: linear, embedding, mixture of experts, attention and its metadata.

Contains no back end and no kernel library.
"""
