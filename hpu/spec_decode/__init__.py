"""Speculative decoding in the worker: proposers of draft tokens, the number of drafts, and their
verification.

Steps are planned in engine/scheduling, models are run in hpu/runner.
"""
