"""KV blocks and layer weights outside the device: copies of blocks to host memory and back, files
of blocks, and layers that launches copy to the device."""
