"""Operating-system processes: the engine's own, its launcher, child processes, isolation."""
