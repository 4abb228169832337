"""The worker: tensors, batch state, buckets, graphs, models and the sampler.

A worker process drives a single device. Requests reach it only through the engine.
"""
