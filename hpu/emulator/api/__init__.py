"""Emulated modules of `habana_frameworks`, which run on the emulated card."""
