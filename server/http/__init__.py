"""The HTTP side: protocol bounds, application, middleware, auth, errors, SSE."""
