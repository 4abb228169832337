"""The bucket table: which padded shapes are prepared, one file per strategy, and the lookup of a
launch's bucket. Pure functions and numbers: no tensors, no device.
"""
