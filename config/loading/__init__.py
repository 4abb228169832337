"""Builds the config dataclasses from flags, environment variables and YAML. Settings are declared
on the dataclass fields; flags.py derives flags from them."""
