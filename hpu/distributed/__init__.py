"""Process groups of the ranks that run a model, and their collectives. Groups for host tensors use
gloo."""
