"""The sampler: from logits to tokens and log-probabilities. A single sampler serves every device,
over operations with exact or static shapes."""
