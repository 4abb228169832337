"""Speculative decoding in the worker: proposers of draft tokens, the number of drafts, and their
verification. drafters/ has a file for each draft method.

Steps are planned in engine/scheduling, models are run in hpu/runner.
"""
