"""Operating-system processes: child processes that end with their parent, limits on their restarts,
the endpoints of engines, and isolated calls."""
