"""Heads that draft from hidden states of the target. Draft models are ordinary decoders;
proposers are in hpu/spec_decode."""
