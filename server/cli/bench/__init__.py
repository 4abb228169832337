"""`gaudiserve bench serve`: a load generator for an OpenAI-compatible server."""
