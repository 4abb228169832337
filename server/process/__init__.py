"""Processes of the server: supervisor, API servers and engine hosts."""
