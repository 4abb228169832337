"""The text pipeline: prompt token ids in, text deltas out."""
