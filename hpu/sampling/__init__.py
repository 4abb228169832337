"""The sampler: parameter columns, device tables, filters, bitmasks, random numbers and
log-probabilities.

A single sampler serves every device. Warm-up is in hpu/warmup, the launch in hpu/runner.
"""
