"""Parameters of a request (sampling, beam search, pooling, structured output, token ids), and
settings of adapters, offloading and speculation."""
