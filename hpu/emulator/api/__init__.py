"""Emulated modules of `habana_frameworks`, and `pyhlml`, which run on the emulated card."""
