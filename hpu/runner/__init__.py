"""Launches for generation and for pooling, and the state that they keep on the device. Sampling and
warm-up have their own folders."""
