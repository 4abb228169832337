"""Drafting with a model or a head: its launches on the CPU and on a device, and the cache of the
target's hidden states. Choice and acceptance of drafts are in hpu/spec_decode; inputs of the
verifying launches are in hpu/runner/draft_buffers.py."""
