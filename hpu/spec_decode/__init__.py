"""Speculative decoding in the worker: proposers of draft tokens, the number of drafts, and their
verification.

Does not plan steps (engine/scheduling) or run models (hpu/runner).
"""
