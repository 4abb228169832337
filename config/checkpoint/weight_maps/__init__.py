"""Which tensors a checkpoint holds, and which parameter of the model each one fills: base.py, and a
file per kind of model or part of a layer.

Declared once, without torch: for the loader, the size estimate and the check of shapes.
"""
