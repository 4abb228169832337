"""Pooling models: routes, request bodies and engine requests for embeddings, classes and scores."""
