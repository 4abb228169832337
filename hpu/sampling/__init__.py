"""The sampler: parameters as columns, device tables, filters, bitmasks, random numbers, logprobs.

One sampler for every device; warm-up lives in hpu/warmup, the launch in hpu/runner.
"""
