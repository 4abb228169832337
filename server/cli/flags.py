"""Command-line parsers with the flags of a server, and logging of their notes. The parsers get the
names of output parsers and emulator faults from here, because config/ must not import them."""

import logging
from functools import partial
from importlib import import_module

from config.loading import parser
from config.loading.sources import Loaded

logger = logging.getLogger(__name__)


def _names(attribute: str) -> list[str]:
    # Imported lazily, because most command lines name no parser.
    return sorted(getattr(import_module("server.parsers.registry"), attribute).all)


def _faults() -> list[str]:
    return sorted(import_module("hpu.emulator.faults").names())


_KINDS: parser.KindNames = {
    "emulator-faults": _faults,
    "tool-call-parser": partial(_names, "TOOL_PARSERS"),
    "reasoning-parser": partial(_names, "REASONING_PARSERS"),
}
server_parser = partial(parser.server_parser, kinds=_KINDS)
command_parser = partial(parser.server_parser, kinds=_KINDS, has_own_flags=True)


def log_notes(loaded: Loaded) -> None:
    """Log how vLLM's spellings were interpreted. Without a log setup, the lines go to stderr."""
    for note in loaded.notes:
        logger.warning("%s", note)
