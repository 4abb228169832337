"""Process groups of the ranks that run one model, and their collectives.

Which backend carries them (HCCL, gloo, NCCL) is the device back end's choice.
"""
