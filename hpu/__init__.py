"""The worker: tensors, batch state, buckets, graphs, models and the sampler.

A worker process drives a single device. It has no users, no sockets, no HTTP.
"""
