"""The modules that `habana_frameworks` has, over the emulated card."""
