"""Operators as plain tensor operations, and the fused kernels of each device behind `Kernels`."""
