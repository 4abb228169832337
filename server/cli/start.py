"""Starts a configured server: names, checkpoint, engines and API servers."""

import dataclasses
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from config import log
from config.checkpoint.model_name import default_names
from config.checkpoint.resolve import resolve
from config.checkpoint.tokenizer_bounds import check_tokenizer_file
from config.engine import EngineConfig
from config.errors import (
    CheckpointError,
    ConfigError,
    EngineDied,
    ProfileWritten,
    checkpoint_errors,
)
from config.loading.env import cache_home
from config.lora.configured import check_adapter_paths, check_adapters
from config.progress import Report
from config.server import ServerConfig
from config.startup_checks import check_checkpoint, check_device, check_model_config
from engine.client.launcher import exit_with_parent, read_orders
from server.cli.private_server import PrivateServerArgs
from server.http.auth import ApiKeys
from server.http.tls import server_context
from server.process.engine_host import serve_engines
from server.process.supervisor import serve
from server.text.chat_template import read_template
from server.text.tokenizer_files import tokenizer_folder

logger = logging.getLogger(__name__)


def main() -> None:
    """Entry point of a PrivateServer process."""
    # The command handles Ctrl-C in the terminal, not this process.
    os.setsid()
    args = read_orders(PrivateServerArgs)
    exit_with_parent()
    log.setup("server", args.server.log, access_log=not args.server.disable_access_log)
    try:
        check_device(args.engine.device)
        sys.exit(start(args.engine, args.server))
    except ProfileWritten as end:
        logger.info("%s", end)
        sys.exit(0)
    except (ConfigError, EngineDied) as error:
        # The last line of the command: the process of the command prints no line of its own.
        print(f"gaudiserve: {error}", file=sys.stderr, flush=True)
        is_setting = isinstance(error, ConfigError) and not isinstance(error, CheckpointError)
        sys.exit(2 if is_setting else 1)


def start(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve until stopped; returns the exit status. The caller has called `check_device`. Raises
    ConfigError."""
    if server.chat_template:
        # Check the files before the engine is launched; the API server reads them later.
        read_template(server.chat_template)
    if engine.data_parallel.has_api_servers:
        ApiKeys(server.api_keys, server.api_key_file)
        if server.ssl_certfile:
            server_context(server)
    names = server.served_model_names or default_names(
        engine.model, {adapter.name for adapter in engine.lora.adapters}
    )
    find = partial(_checked, engine, server)
    server = dataclasses.replace(server, served_model_names=names)
    run = serve if engine.data_parallel.has_api_servers else serve_engines
    return run(engine, server, find)


def _checked(engine: EngineConfig, server: ServerConfig, report: Report) -> str:
    with checkpoint_errors():
        return resolve_checkpoint(engine, server, report)


@contextmanager
def _naming(model: str, folder: str) -> Iterator[None]:
    """Make errors in the block show the model name that the user gave instead of `folder`, its
    local copy. Paths of files are kept."""
    try:
        yield
    except ConfigError as error:
        renamed = re.sub(rf"{re.escape(folder)}(?![\w/.-])", lambda _: model, str(error))
        raise type(error)(renamed) from error


def _check_model(engine: EngineConfig, folder: str) -> None:
    with _naming(engine.model, folder):
        check_model_config(engine, folder)


def resolve_checkpoint(engine: EngineConfig, server: ServerConfig, report: Report) -> str:
    """Download and convert the checkpoint; returns its folder. Raises ConfigError."""
    check_adapter_paths(engine.lora)
    # Without a terminal, the API server logs the progress.
    progress = sys.stderr.isatty()
    check = partial(_check_model, engine)
    folder = resolve(engine, check=check, report=report, progress=progress)
    with _naming(engine.model, folder):
        check_checkpoint(engine, folder)
    check_adapters(engine.lora, folder, engine.download_dir)
    if not server.skip_tokenizer_init:
        # Resolve and check the tokenizer here, where progress is reported, before an engine starts.
        # API servers find a converted tokenizer in the cache.
        found = tokenizer_folder(folder, Path(engine.cache_dir or cache_home()), report)
        check_tokenizer_file(found / "tokenizer.json")
    return folder
