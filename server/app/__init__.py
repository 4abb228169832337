"""ASGI application: the routes of all APIs behind the middleware, and their OpenAPI description."""
