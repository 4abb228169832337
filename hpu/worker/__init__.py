"""Worker of a device, from start-up to sleep, and its memory budget."""
