"""Processes of the server: supervisor, API servers, model download, requests to peers."""
