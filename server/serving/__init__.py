"""Shared by the routes of all APIs: the server's state, and a request from admission to
response."""
