"""Weight maps: which tensors a checkpoint holds and which model parameter each tensor fills.
base.py has the types; each kind of model or part of a layer has a file.

The loader, the size estimate and the check of shapes share these maps. No torch here.
"""
