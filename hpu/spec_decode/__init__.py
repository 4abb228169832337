"""Speculative decoding in the worker: proposers of draft tokens, the number of drafts, and their
verification."""
