"""Bucket table: the strategies that select the padded shapes to prepare, and the lookup of a
launch's bucket. Uses no tensors and no device."""
