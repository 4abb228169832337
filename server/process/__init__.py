"""Processes of the server: supervisor, API servers, model download."""
