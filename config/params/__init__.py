"""Parameters of a request (sampling, beam search, pooling, structured output), and settings of
adapters and speculation."""
