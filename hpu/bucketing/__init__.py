"""Bucket table: selects the padded shapes to prepare (a file per strategy) and looks up the bucket
of a launch. Uses no tensors and no device."""
