"""`gaudiserve bench serve`: a load client for one OpenAI-compatible server."""
