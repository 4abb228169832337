"""Command-line parsers with the flags of a server, and logging of their notes. The parsers get the
names of output parsers and emulator faults from here, because config/ must not import them."""

import logging
from functools import partial
from importlib import import_module

from config.errors import ConfigError
from config.loading import parser
from config.loading.flags import FLAGS
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


def refuse_address(loaded: Loaded) -> None:
    """Raises ConfigError if a flag names the host or port of a server, since the command's own
    server has neither. A variable or file may be for other commands."""
    for key in ("host", "port"):
        if loaded.sources[key][1].startswith("flag"):
            raise ConfigError(
                f"--{key} has no effect: this command starts its own server, without a port; for a "
                f"running server use --base-url http://{loaded.server.host}:{loaded.server.port}"
            )


def refuse_settings(loaded: Loaded, selection: str) -> None:
    """Raises ConfigError if a flag or MODEL is a setting of the server that the command would start
    without --base-url. `selection`: how a model of the running server is selected. A variable or
    file may be for other commands."""
    for flag in FLAGS:
        value, source = loaded.sources[flag.key]
        if (
            flag.key == "api-key"
            or flag.setting.group == "Logs"
            or not source.startswith(("flag", "argument"))
        ):
            continue
        if flag.key == "model":
            raise ConfigError(
                f"{value} is the model that this command would serve, and --base-url names a "
                f"running server: leave one of them out; {selection}"
            )
        raise ConfigError(
            f"--{flag.key} is a setting of the server that this command would start, and "
            "--base-url names a running server: leave one of them out"
        )


def log_notes(loaded: Loaded) -> None:
    """Log how vLLM's spellings were interpreted. Without a log setup, the lines go to stderr."""
    for note in loaded.notes:
        logger.warning("%s", note)
