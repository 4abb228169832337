"""Processes of the server, such as the supervisor, API servers and engine hosts."""
