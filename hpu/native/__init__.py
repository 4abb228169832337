"""The C++ kernels of the CPU back end, and the library that builds and loads them."""
