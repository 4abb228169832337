"""The flags of `gaudiserve bench serve`, and their checks."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from config.errors import ConfigError
from config.loading.parser import Parser
from server.cli.bench.openai import PATHS

DESCRIPTION = """\
Measure an OpenAI-compatible server under load: time to first token, inter-token latency, time per
output token, end-to-end latency, throughput. Closed loop: --max-concurrency requests are always
running. Open loop: --request-rate requests start per second (a Poisson process), whether or not
earlier ones have finished."""


def bench_parser() -> Parser:
    """All flags of the command."""
    parser = Parser(
        prog="gaudiserve bench serve",
        usage="gaudiserve bench serve [flags]",
        description=DESCRIPTION,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
    )
    _add_server(parser.add_argument_group("Server"))
    _add_load(parser.add_argument_group("Load"))
    _add_lengths(parser.add_argument_group("Requests, in tokens"))
    _add_fields(parser.add_argument_group("Requests, other fields"))
    output = parser.add_argument_group("Output")
    output.add_argument("--json", metavar="FILE", help="Write the report as JSON; - for stdout")
    output.add_argument("--quiet", action="store_true", help="No progress bar")
    return parser


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags; extra_body is decoded. Raises ConfigError."""
    options = bench_parser().parse_all(argv)
    _check(options)
    return options


def _add_server(server: argparse._ArgumentGroup) -> None:
    server.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="With or without /v1 [%(default)s]",
    )
    server.add_argument("--model", metavar="NAME", help="[the first of /v1/models]")
    server.add_argument(
        "--endpoint", choices=sorted(PATHS), default="completions", help="[%(default)s]"
    )
    server.add_argument("--api-key", metavar="KEY", help="[the variable OPENAI_API_KEY]")
    server.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="Timeout of a request [%(default)g]",
    )


def _add_load(load: argparse._ArgumentGroup) -> None:
    load.add_argument("--num-prompts", type=int, default=32, metavar="N", help="[%(default)s]")
    load.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="Concurrent requests [8; with --request-rate no limit]",
    )
    load.add_argument(
        "--request-rate",
        type=float,
        metavar="PER_SECOND",
        help="Requests per second (open loop); inf sends all at once [closed loop]",
    )
    load.add_argument(
        "--num-warmups",
        type=int,
        default=2,
        metavar="N",
        help="Warm-up requests, not counted [%(default)s]",
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="[%(default)s]")


def _add_lengths(lengths: argparse._ArgumentGroup) -> None:
    for name in ("--random-input-len", "--random-output-len"):
        lengths.add_argument(name, type=int, default=128, metavar="N", help="[%(default)s]")
    lengths.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="Draw lengths from (1 - R) to (1 + R) times these [%(default)g]",
    )
    lengths.add_argument(
        "--shared-prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="Common prefix of all prompts, before --random-input-len [%(default)s]",
    )
    lengths.add_argument(
        "--prompt-kind",
        choices=("auto", "tokens", "text"),
        default="auto",
        help="tokens sends ids (completions only); auto: ids if the server has /tokenize [auto]",
    )


def _add_fields(fields: argparse._ArgumentGroup) -> None:
    fields.add_argument(
        "--no-ignore-eos", action="store_true", help="Let the model end before --random-output-len"
    )
    fields.add_argument(
        "--no-stream-usage",
        action="store_true",
        help="Send no stream_options, for servers that reject it; counts chunks as tokens",
    )
    fields.add_argument("--temperature", type=float, default=0.0, metavar="T", help="[%(default)g]")
    fields.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="An object merged into each request body"
    )


def _check(options: argparse.Namespace) -> None:
    for name in ("num_prompts", "random_input_len", "random_output_len"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{_flag(name)} is {getattr(options, name)}, it must be at least 1")
    for name in ("max_concurrency", "num_warmups", "shared_prefix_len"):
        minimum = 1 if name == "max_concurrency" else 0
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise ConfigError(f"{_flag(name)} is {value}, it must be at least {minimum}")
    if options.temperature < 0:
        raise ConfigError(f"temperature is {options.temperature}, it must be at least 0")
    if not 0 <= options.random_range_ratio <= 1:
        raise ConfigError(
            f"random-range-ratio is {options.random_range_ratio}, it must be between 0 and 1"
        )
    for name in ("timeout", "request_rate"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{_flag(name)} is {value}, it must be above 0")
    try:
        extra = json.loads(options.extra_body)
    except ValueError as error:
        raise ConfigError(f"extra-body is {options.extra_body!r}, no JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"extra-body is {options.extra_body!r}, it must be a JSON object")
    options.extra_body = extra
    if options.json not in (None, "-") and not Path(options.json).absolute().parent.is_dir():
        raise ConfigError(f"json is {options.json!r}, there is no such folder")
    if options.prompt_kind == "tokens" and options.endpoint == "chat":
        raise ConfigError("prompt-kind is tokens, but the chat endpoint takes text only")


def _flag(name: str) -> str:
    return name.replace("_", "-")
