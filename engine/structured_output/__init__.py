"""Structured output: size checks of grammars, compilation in an isolated process, token-by-token
matching, and the end of reasoning."""
