"""Worker of a device: build, load, profile run, warm-up, steps, sleep; and its memory budget."""
