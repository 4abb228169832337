"""Reasoning parsers, which split reasoning from the answer."""
