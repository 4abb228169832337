"""What one request may ask for: sampling, beam search, pooling, structured output."""
