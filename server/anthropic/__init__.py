"""Messages API: routes, bodies and responses, built on the chat pipeline."""
