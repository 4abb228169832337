"""Drafting and verification in the runner: runners whose decodes verify drafts, launches of a draft
model or head on the CPU and on a device, and the cache of the target's hidden states."""
