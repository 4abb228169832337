"""Runtime diagnostics, warnings about slow steps, and Chrome traces of a worker."""
