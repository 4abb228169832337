"""Emulation of the vendor's package on a CPU, which enforces the rules of the card.

It is not a back end: hpu/backends/gaudi.py runs on it unchanged.
"""
