"""Workers, which run models on devices, and the self-test, diagnosis and emulation of Gaudi cards.

A worker process drives a single device.
"""
