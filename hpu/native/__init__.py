"""The CPU back end's C++ kernels, and the library that compiles and loads them.

Nothing outside hpu/backends/cpu.py imports it; tests/test_layers.py holds that.
"""
