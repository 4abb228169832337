"""Drafting and verification in the runner: runners whose decodes verify drafts, launches of a draft
model or head on the CPU and on a device, and the cache of the target's hidden states.

Proposal and acceptance of drafts are in hpu/spec_decode; inputs of the verifying launches are in
hpu/runner/draft_buffers.py.
"""
