"""The CPU back end's C++ library: its kernels, compilation and memory, and the decoders and vision
towers that run in it."""
