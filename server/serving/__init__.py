"""Code that the routes of all APIs share: the server's state, and requests from admission to
response."""
