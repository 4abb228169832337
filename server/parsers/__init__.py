"""Parsers of model output: reasoning, text and tool calls, streamed.

registry.py turns a name into a parser.
"""
