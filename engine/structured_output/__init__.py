"""Grammars: checked, compiled in an isolated process, and followed token by token."""
