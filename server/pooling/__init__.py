"""Embeddings, classification and scores: routes, bodies, and requests to the engine."""
