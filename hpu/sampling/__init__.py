"""From logits to tokens on the device: penalties, filters, bitmasks, RNG, logprobs."""
