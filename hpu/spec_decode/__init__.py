"""Speculative decoding in the worker: proposers of draft tokens, how many are drafted, and their
verification. Does not plan steps (engine/scheduling) and runs no model of its own accord
(hpu/runner)."""
