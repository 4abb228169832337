"""The decoder families, in files of similar ones: each file has a mapping FAMILIES of architecture
names to entries of the registry.

An entry is all that the rest knows of a family: its fields in config.json and its spec.
"""
