"""Properties of the values of --device, one file for each kind of device; hpu/backends/ has a file
of the same name with the tensor code."""
