"""Parameters of a request (sampling, beam search, pooling, structured output), and settings of
adapters, offloading and speculation."""
