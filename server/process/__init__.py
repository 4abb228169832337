"""Processes of the server: supervisor, API servers, engine hosts, model download."""
