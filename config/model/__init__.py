"""The configuration of a checkpoint, read from config.json and the files next to it, without
weights."""
