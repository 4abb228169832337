"""Processes of the server: supervisor, API servers and engine hosts; their sockets, start-up and
watched files."""
