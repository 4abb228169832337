"""Grammars: size checks, compilation in an isolated process, and token-by-token matching."""
