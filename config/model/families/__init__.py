"""Decoder families. Each file has related families, and a mapping FAMILIES of architecture names to
registry entries. An entry has everything that other code needs to know about a family: its
config.json fields and its spec."""
