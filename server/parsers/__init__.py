"""Streaming parsers of model output: reasoning, text and tool calls. registry.py maps names to
parsers."""
