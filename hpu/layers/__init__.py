"""Layers of the models, and the metadata of attention.

Contains no back end and no kernel library.
"""
