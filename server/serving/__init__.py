"""Code shared by the routes of all APIs: the server's state, and requests from admission to
response."""
