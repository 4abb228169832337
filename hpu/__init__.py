"""The worker: tensors, batch state, buckets, graphs, models and the sampler.

One worker process drives one device. No users, no sockets, no HTTP.
"""
