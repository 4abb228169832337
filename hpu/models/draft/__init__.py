"""Heads that draft from hidden states of the target. Draft models are decoders like any other; what
proposes drafts is in hpu/spec_decode."""
