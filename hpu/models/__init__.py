"""Models built from layers, and the registry that maps an architecture to its model.

Contains no back end, kernel library or file access: config/checkpoint/weight_maps/ names the
weights.
"""
