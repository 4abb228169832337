"""The CPU back end's C++ kernels, and the library that compiles and loads them.

Only hpu/backends/cpu.py imports this package; tests/test_layers.py checks it.
"""
