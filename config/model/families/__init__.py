"""Decoder families. Each file holds related families and has a mapping FAMILIES of architecture
names to registry entries.

A registry entry is everything that other code reads about a family: its fields in config.json and
its spec.
"""
