"""Operating-system processes: children that end with their parent, and isolated calls."""
