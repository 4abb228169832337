"""Emulation of the vendor's package on a CPU, which enforces the rules of the card."""
