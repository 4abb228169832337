"""Process groups of the ranks that run a model, and their collectives.

The device backend chooses the torch.distributed backend (HCCL, gloo, NCCL).
"""
