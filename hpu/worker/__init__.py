"""One device's life: build, load, profile run, warm up, step, sleep; and its memory budget."""
