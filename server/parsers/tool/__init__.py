"""Tool-call parsers, a file for each kind of format, and the grammars for constrained calls."""
