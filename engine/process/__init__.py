"""Operating-system processes: child processes that end with their parent, and isolated calls."""
