"""The Messages API: its routes, bodies and answers, over the chat pipeline."""
