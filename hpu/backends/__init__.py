"""The back ends of the devices, which implement the protocol Backend."""
