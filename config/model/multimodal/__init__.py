"""Models with images: the text model in them, and the facts of their vision tower."""
