"""Reasoning parsers: split reasoning from the answer."""
