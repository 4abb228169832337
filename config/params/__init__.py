"""Parameters of one request (sampling, beam search, pooling, structured output), and settings of
what requests may ask beyond the model: adapters, speculation."""
