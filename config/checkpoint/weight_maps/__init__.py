"""Weight maps: the tensors of a checkpoint and the model parameter that each tensor fills. base.py
defines WeightMap and WeightSpec. Imports no torch."""
