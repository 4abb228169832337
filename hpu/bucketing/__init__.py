"""The bucket table: choice of the padded shapes to prepare (a file per strategy), and the lookup of
a launch's bucket. Pure functions and numbers: no tensors, no device."""
