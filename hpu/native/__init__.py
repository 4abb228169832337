"""The CPU back end's C++ kernels, and the library that compiles and loads them."""
