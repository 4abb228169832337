"""The ASGI application: the routes of all APIs inside the middleware, and their description."""
