"""The emulated card and its rules."""
