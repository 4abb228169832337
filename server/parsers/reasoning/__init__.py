"""Reasoning parsers: thinking told apart from the answer."""
