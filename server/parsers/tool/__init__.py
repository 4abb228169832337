"""Tool-call parsers, one file a family, and the grammars that forced calls follow."""
