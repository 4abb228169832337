"""Structured output: size checks of grammars, compilation after a trial in an isolated process,
token-by-token matching, and the end of reasoning."""
