"""ASGI application: the routes of all APIs inside the middleware, and their OpenAPI description."""
