"""Facts about the devices of --device, a file each; hpu/backends/ has the other half of each."""
