"""Model definitions, and the registry from architecture name to class."""
