"""Weight maps: the tensors of a checkpoint and the model parameter that each tensor fills. base.py
defines the types; each kind of model or layer has its own file. The loader, the memory estimate and
the shape check use these maps. Imports no torch."""
