"""Operators as plain tensor maths, and each device's fused kernels behind `Kernels`."""
