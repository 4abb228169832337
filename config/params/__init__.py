"""Parameters of one request: sampling, beam search, pooling, structured output."""
