"""The text pipeline: token ids in, text deltas out. Sequences, beam search, limits."""
