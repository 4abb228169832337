"""`gaudiserve bench`: a load generator for an OpenAI-compatible server, and offline benchmarks."""
