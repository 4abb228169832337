"""The text pipeline: prompt token ids in, text deltas out. Sequences, beam search,
log-probabilities, answer parsers, limits."""
