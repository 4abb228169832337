"""The command `gaudiserve`: dispatches to the subcommands. Each subcommand imports its modules when
it runs, so that `--help` and `config` start fast."""

import itertools
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module

from config import log
from config.devices.base import DEVICES
from config.engine import DEFAULT_MEMORY_UTILIZATION, EXTERNAL_LAUNCHER, EngineConfig
from config.errors import (
    CheckpointError,
    CommandFailed,
    ConfigError,
    EngineDied,
    ProfileWritten,
    ReasonPrinted,
    RequestFailed,
    UserError,
    checkpoint_errors,
)
from config.loading.env import chosen_device, disable_autoload, environment, hpu_mode
from config.loading.flags import FLAGS
from config.loading.parser import FlagParser
from config.loading.sources import DEFAULT, Loaded, load
from config.loading.values import nearest
from config.loading.vendor_variables import ignored_variables
from config.model.quantization.inc import INC
from config.server import ServerConfig
from config.version import VERSION, installed_version
from server.cli.flags import command_parser, log_notes, server_parser

logger = logging.getLogger(__name__)

BENCH_HELP = """\
usage: gaudiserve bench serve [flags]               an OpenAI-compatible server under load
       gaudiserve bench throughput [MODEL] [flags]  requests and tokens per second, without HTTP
       gaudiserve bench latency [MODEL] [flags]     latency of a batch, without HTTP

gaudiserve bench COMMAND --help shows the flags of a command.
"""
HELP = f"""\
usage: gaudiserve COMMAND ...

OpenAI-compatible serving daemon for Intel Gaudi (HPU), with a CPU back end for other machines.

commands:
  serve [MODEL]   start the server; without a model, serve the demo model
  chat [MODEL]    chat in the terminal
  run-batch       answer a file of requests in OpenAI's batch format
  bench serve     benchmark an OpenAI-compatible server
  bench throughput, bench latency
                  benchmark a model in this process, without HTTP
  buckets show    print the bucket table of a strategy, and its padding for measured lengths
  buckets fit     fit a bucket table to measured lengths
  plan [MODEL]    estimate the memory that a model needs on Gaudi cards, without a card
  presets [MODEL] print settings for a model on Gaudi cards, for --config
  calibrate MODEL measure a model for FP8 with Intel Neural Compressor, on Gaudi
  doctor          check whether this machine can run a server
  selftest        check the server's assumptions about a card on this card
  quantize MODEL  write a checkpoint with quantized weights
  fetch-demo      download the demo model into the cache folder
  config          print the resolved configuration and the source of each value
  vllm-command    write a command `vllm` that runs gaudiserve, for scripts that call vllm

  Flags without a command are flags of serve: gaudiserve --model MODEL.
  gaudiserve COMMAND --help shows the flags of a command, --help=WORD flags with WORD in their name.
  gaudiserve --version prints {VERSION}.
"""

SERVE = """\
Serve a model to OpenAI clients, at http://localhost:8000/v1 unless --host or --port is set.
This text has the most used flags. --help-all shows all flags, --help=WORD a group (--help=http) or
the flags with WORD in their name (--help=max-num-seqs).
"""

TEXTS = {
    **dict.fromkeys(("-h", "--help", "help"), HELP),
    **dict.fromkeys(("-V", "-v", "--version", "version"), f"{VERSION}\n"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status (see docs/configuration.md)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(HELP, end="")
        return 2
    disable_autoload()
    try:
        if words[0] == "help" and len(words) > 1:
            words = [*words[1:], "--help"]
        if text := TEXTS.get(words[0]):
            if len(words) > 1:
                raise ConfigError(f"`gaudiserve {words[0]}` takes no argument {words[1]!r}")
            print(text, end="")
            return 0
        if words[0].startswith("-"):
            # Helm charts for vLLM override only the image's arguments, so the first word may be a
            # flag of serve.
            words.insert(0, "serve")
        return _command(words[0])(words[1:])
    except (CheckpointError, CommandFailed, EngineDied, RequestFailed) as error:
        print(f"gaudiserve: {error}", file=sys.stderr)
        return 1
    except ReasonPrinted as end:
        return end.status
    except ProfileWritten as end:
        print(f"gaudiserve: {end}", file=sys.stderr)
        return 0
    except (ConfigError, UserError) as error:
        print(f"gaudiserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of stdout closed the pipe: make the flush at interpreter exit succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _command(name: str) -> Callable[[list[str]], int]:
    command = COMMANDS.get(name)
    if command is None:
        hint = nearest(name, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        raise ConfigError(f"{name!r} is not a command{hint}")
    return command


def _serve(argv: list[str]) -> int:
    from config.checkpoint.demo import NAMES

    # Settings are sent to other processes as UTF-8.
    for word in argv:
        if word.encode(errors="replace").decode() != word:
            raise ConfigError(f"the argument {word!r} is not UTF-8: rename the file or folder")
    parser = server_parser("gaudiserve serve", SERVE)
    parser.examples = (
        "gaudiserve serve",
        "gaudiserve serve /data/model --max-model-len 8K --port 8001",
        "gaudiserve serve org/name --device hpu --tensor-parallel-size 4 --api-key KEY",
    )
    loaded = load(argv, default_model=NAMES[0], parser=parser)
    if loaded.engine.executor == EXTERNAL_LAUNCHER:
        raise ConfigError(
            f"--distributed-executor-backend is {EXTERNAL_LAUNCHER}, which is for scripts with "
            "LLM under torchrun: use mp or ray"
        )
    server = loaded.server
    log.setup("server", server.log, access_log=not server.disable_access_log)
    check_early(loaded.engine, server)
    logger.info("%s", software_line(loaded.engine))
    log_spellings(loaded)
    if ignored := ignored_variables(environment()):
        logger.warning("Variables without effect: %s", _with_reasons(ignored))
    from config.progress import ProgressLines

    with ProgressLines("importing the server"):
        from server.cli.presets import with_preset
        from server.cli.selftest import served
        from server.cli.start import start

    return start(served(with_preset(loaded, argv), loaded).engine, server)


def check_early(engine: EngineConfig, server: ServerConfig) -> None:
    """Check the port, the model's name and the device's software, before the slow imports of the
    server. Raises ConfigError."""
    from config.checkpoint.model_name import check_model_name
    from server.process.listening import bind_port

    if server.uds is None and server.port and engine.data_parallel.has_api_servers:
        bind_port(server.host, server.port, shared=False).close()
    with checkpoint_errors():
        check_model_name(engine.model)
    from config.startup_checks import check_device

    check_device(engine.device)


def software_line(engine: EngineConfig) -> str:
    """The first line of a server's log: versions, model and device. Imports no torch."""
    return (
        f"gaudiserve {VERSION}, Python {platform.python_version()}, "
        f"torch {installed_version('torch')}: model {engine.model}, "
        f"device {chosen_device(engine.device)}"
    )


def log_spellings(loaded: Loaded) -> None:
    """Log how vLLM's spellings were interpreted, and which vLLM flags have no effect."""
    log_notes(loaded)
    if loaded.without_effect:
        logger.info("Accepted without effect: %s", _with_reasons(loaded.without_effect))


def _with_reasons(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name} ({reason})" for name, reason in reasons.items())


def config_parser() -> FlagParser:
    """Parser with the flags of `config` and the flags of `serve`."""
    parser = command_parser(
        "gaudiserve config",
        "Print the configuration that `serve` would run with. Exit status: 0, or 2 for wrong "
        "settings.",
    )
    parser.examples = (
        "gaudiserve config /data/model --max-num-seqs 64",
        "gaudiserve config --config serve.yaml --changed",
        "gaudiserve config --json",
    )
    parser.add_argument(
        "--changed",
        action="store_true",
        help="Print only what a flag, a variable or a file sets",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON")
    return parser


def _config(argv: list[str]) -> int:
    from config.checkpoint.demo import NAMES

    loaded = load(argv, default_model=NAMES[0], parser=config_parser())
    log_notes(loaded)
    shown = loaded.shown()
    if loaded.arguments.changed:
        shown = {key: row for key, row in shown.items() if row[1] != DEFAULT}
    print((_as_json if loaded.arguments.json else _as_table)(shown))
    mode, note = _mode(loaded.engine)
    unread = dict(_unread(loaded.engine, mode))
    # JSON on stdout is for programs.
    file = sys.stderr if loaded.arguments.json else sys.stdout
    if without_effect := {**loaded.without_effect, **unread, **ignored_variables(environment())}:
        print(f"\nWithout effect here: {_with_reasons(without_effect)}", file=file)
    if note:
        print(f"\n`serve` would fail on this machine: {note}", file=file)
    return 0


def _mode(engine: EngineConfig) -> tuple[str, str]:
    """(execution mode, why this machine cannot run it). The mode is empty if the device is no
    Gaudi. Raises ConfigError for settings that contradict each other on every machine."""
    if not DEVICES[chosen_device(engine.device)].is_gaudi:
        return "", ""
    try:
        return hpu_mode(engine).mode, ""
    except ConfigError as error:
        return hpu_mode(engine, has_vendor_torch=True).mode, str(error)


def _unread(engine: EngineConfig, mode: str) -> list[tuple[str, str]]:
    """(flag, reason) of changed settings that the device or another setting leaves without effect.
    `mode`: the execution mode of a Gaudi."""
    device = chosen_device(engine.device)
    if DEVICES[device].is_gaudi:
        return engine.execution.unread_in(mode, uses_compressor=engine.quantization == INC)
    unread = [(flag, "only a Gaudi reads it") for flag in engine.execution.changed_on_gaudi]
    utilization = engine.cache.gpu_memory_utilization
    if device == "cpu" and utilization != DEFAULT_MEMORY_UTILIZATION:
        unread.append(("--gpu-memory-utilization", "a CPU reads --kv-cache-memory-bytes"))
    return unread


def _as_json(shown: Mapping[str, tuple[object, str]]) -> str:
    rows = {key: {"value": value, "source": source} for key, (value, source) in shown.items()}
    return json.dumps(rows, indent=2)


def _as_table(shown: Mapping[str, tuple[object, str]]) -> str:
    rows = [
        (flag.setting.group, flag.key, flag.shown(shown[flag.key][0]), shown[flag.key][1])
        for flag in FLAGS
        if flag.key in shown
    ]
    if not rows:
        return "Every setting has its default."
    widths = [max(len(row[column]) for row in rows) for column in (1, 2)]
    blocks = []
    for group, members in itertools.groupby(rows, key=lambda row: row[0]):
        lines = [f"{group}:"]
        lines += [
            f"  {key:<{widths[0]}}  {value:<{widths[1]}}  {source}"
            for _, key, value, source in members
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _fetch_demo(argv: list[str]) -> int:
    parser = FlagParser(
        prog="gaudiserve fetch-demo",
        usage="gaudiserve fetch-demo [flags]",
        description="Download the demo model into the cache folder, and print its path.",
    )
    parser.examples = ("gaudiserve fetch-demo --cache-dir /data/cache",)
    (cache_dir,) = (flag for flag in FLAGS if flag.key == "cache-dir")
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        default=environment().get(cache_dir.variable),
        help=f"{cache_dir.setting.help} [{cache_dir.shown_default}]",
    )
    options = parser.parse_all(argv)
    log.setup("fetch-demo")
    from config.checkpoint.demo import NAMES
    from config.checkpoint.resolve import resolve
    from config.engine import EngineConfig
    from config.progress import ProgressLines

    # resolve also converts the checkpoint, so that the first start is fast.
    with ProgressLines(prefix="") as lines:
        engine = EngineConfig(NAMES[0], cache_dir=options.cache_dir)
        folder = resolve(engine, report=lines.report)
    print(folder)
    return 0


def _bench(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(BENCH_HELP, end="")
        return 0 if argv else 2
    action, *rest = argv
    if action == "serve":
        return _module("bench.command", rest)
    if action in ("throughput", "latency"):
        offline = import_module("server.cli.bench.offline")
        status: int = getattr(offline, action)(rest)
        return status
    raise ConfigError(
        f"`gaudiserve bench {action}` is not a command: use serve, throughput or latency"
    )


def _module(name: str, argv: list[str]) -> int:
    status: int = import_module(f"server.cli.{name}").main(argv)
    return status


COMMANDS: Mapping[str, Callable[[list[str]], int]] = {
    "serve": _serve,
    "bench": _bench,
    "fetch-demo": _fetch_demo,
    "config": _config,
    "buckets": partial(_module, "buckets"),
    "plan": partial(_module, "plan"),
    "presets": partial(_module, "presets"),
    "doctor": partial(_module, "doctor"),
    "selftest": partial(_module, "selftest"),
    "calibrate": partial(_module, "calibrate"),
    "quantize": partial(_module, "quantize"),
    "run-batch": partial(_module, "run_batch"),
    "chat": partial(_module, "chat"),
    "vllm-command": partial(_module, "vllm_command"),
}

if __name__ == "__main__":
    sys.exit(main())
