"""Weight maps: the tensors of a checkpoint and the model parameter that each tensor fills. base.py
defines the types. Imports no torch."""
