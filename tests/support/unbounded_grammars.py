"""Compiles grammars in a fork like engine/structured_output/compilation.py, without limits on
schemas."""

from collections.abc import Callable

from engine.structured_output import compilation, json_schema


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    json_schema.check_schema_size = lambda schema: None
    return compilation.prepare(setup)
