"""Process groups of the ranks that run a model, and their collectives.

The device's back end chooses the back end of torch.distributed (HCCL, gloo, NCCL); groups for host
tensors use gloo.
"""
