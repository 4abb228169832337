"""The bucket table: which padded shapes are prepared, and which one a launch takes. Pure."""
