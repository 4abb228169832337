"""Models built from layers, and the registry from architecture to model.

No back end, no kernel library and no files: config/checkpoint/weight_maps/ names the weights.
"""
