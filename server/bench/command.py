"""`gaudiserve bench serve`: its flags, one run, and what is printed. Knows no HTTP."""

import argparse
import datetime
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from tqdm import tqdm

from config.arguments import Parser
from config.env import environment
from config.errors import ConfigError
from config.version import VERSION
from server.bench.load import closed_loop, open_loop
from server.bench.openai import PATHS, OpenAIServer, Outcome, first_model
from server.bench.report import Report, as_dict, as_text, summarise
from server.bench.target import HttpFailure, Target
from server.bench.workload import Job, Shape, gaps, text_jobs, token_jobs

DESCRIPTION = """\
Load an OpenAI-compatible server and measure it: time to first token, inter-token latency, time per
output token, end-to-end time, throughput. Closed loop: --max-concurrency requests are always
running. Open loop: --request-rate requests start each second (a Poisson process), come what may."""


def parser() -> Parser:
    """All flags of the command."""
    made = Parser(
        prog="gaudiserve bench serve",
        usage="gaudiserve bench serve [flags]",
        description=DESCRIPTION,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
    )
    target = made.add_argument_group("Server")
    target.add_argument(
        "--base-url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="With or without /v1 [%(default)s]",
    )
    target.add_argument("--model", metavar="NAME", help="[the first of /v1/models]")
    target.add_argument(
        "--endpoint", choices=sorted(PATHS), default="completions", help="[%(default)s]"
    )
    target.add_argument("--api-key", metavar="KEY", help="[the variable OPENAI_API_KEY]")
    target.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="For one request [%(default)g]",
    )
    load = made.add_argument_group("Load")
    load.add_argument("--num-prompts", type=int, default=32, metavar="N", help="[%(default)s]")
    load.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="Requests that run at once [8; with --request-rate no limit]",
    )
    load.add_argument(
        "--request-rate",
        type=float,
        metavar="PER_SECOND",
        help="Open loop; inf sends all at once [closed loop]",
    )
    load.add_argument(
        "--num-warmups",
        type=int,
        default=2,
        metavar="N",
        help="Requests sent first and not counted [%(default)s]",
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="[%(default)s]")
    shape = made.add_argument_group("Requests, in tokens")
    for name in ("--random-input-len", "--random-output-len"):
        shape.add_argument(name, type=int, default=128, metavar="N", help="[%(default)s]")
    shape.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="Lengths are drawn from (1 - R) to (1 + R) times these [%(default)g]",
    )
    shape.add_argument(
        "--shared-prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="The same for all, before the input of each [%(default)s]",
    )
    shape.add_argument(
        "--prompt-kind",
        choices=("auto", "tokens", "text"),
        default="auto",
        help="tokens sends ids (completions only); auto does where the server has /tokenize [auto]",
    )
    shape.add_argument(
        "--no-ignore-eos", action="store_true", help="Let the model end where it likes"
    )
    shape.add_argument(
        "--no-stream-usage",
        action="store_true",
        help="Leave stream_options out, for servers that refuse it; pieces are counted as tokens",
    )
    shape.add_argument("--temperature", type=float, default=0.0, metavar="T", help="[%(default)g]")
    shape.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="An object put into each request"
    )
    output = made.add_argument_group("Output")
    output.add_argument("--json", metavar="FILE", help="Write the numbers there; - for stdout")
    output.add_argument("--quiet", action="store_true", help="No progress bar")
    return made


def main(argv: Sequence[str]) -> int:
    """0, or 1 when a request failed. Raises ConfigError for wrong flags or an unusable server."""
    options = parser().parse_all(argv)
    _check(options)
    try:
        report, model, kind = uvloop.run(_run(options))
    except (OSError, HttpFailure) as error:
        raise ConfigError(f"{options.base_url} cannot be measured: {error}") from None
    table = as_text(report)
    content = json.dumps(_document(options, report, model, kind), indent=2)
    if options.json == "-":
        print(content)
    else:
        print(table)
        if options.json:
            _write(options.json, content)
    return 1 if report.failures or not report.completed else 0


def _write(path: str, content: str) -> None:
    try:
        Path(path).write_text(content + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"json is {path!r}, it cannot be written: {error}") from None


def _check(options: argparse.Namespace) -> None:
    for name in ("num_prompts", "random_input_len", "random_output_len"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{_flag(name)} is {getattr(options, name)}, it must be at least 1")
    for name in ("max_concurrency", "num_warmups", "shared_prefix_len"):
        least = 1 if name == "max_concurrency" else 0
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"{_flag(name)} is {value}, it must be at least {least}")
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


async def _run(options: argparse.Namespace) -> tuple[Report, str, str]:
    target = Target(options.base_url, options.api_key or environment().get("OPENAI_API_KEY"))
    try:
        model = options.model or await first_model(target)
        extra = {"temperature": options.temperature}
        if not options.no_ignore_eos:
            extra["ignore_eos"] = True
        server = OpenAIServer(
            target,
            options.endpoint,
            model,
            {**extra, **options.extra_body},
            asks_usage=not options.no_stream_usage,
        )
        warmups = options.num_warmups
        shape = Shape(
            options.num_prompts + warmups,
            options.random_input_len,
            options.random_output_len,
            options.random_range_ratio,
            options.shared_prefix_len,
            options.seed,
        )
        jobs, kind = await _jobs(server, shape, options)
        for job in jobs[:warmups]:
            await server.ask(job, options.timeout)
        outcomes = await _load(server, jobs[warmups:], options)
        return summarise(outcomes), model, kind
    finally:
        await target.close()


async def _load(
    server: OpenAIServer, jobs: list[Job], options: argparse.Namespace
) -> list[Outcome]:
    async def ask(job: Job) -> Outcome:
        return await server.ask(job, options.timeout)

    with tqdm(total=len(jobs), unit="req", disable=options.quiet, file=sys.stderr) as bar:

        def seen() -> None:
            bar.update(1)

        if options.request_rate is None:
            return await closed_loop(ask, jobs, options.max_concurrency or 8, seen)
        waits = gaps(options.request_rate, len(jobs), options.seed)
        return await open_loop(ask, jobs, waits, options.max_concurrency, seen)


async def _jobs(
    server: OpenAIServer, shape: Shape, options: argparse.Namespace
) -> tuple[list[Job], str]:
    """The requests, and how exact their lengths are: tokens, text, or words."""
    try:
        if options.prompt_kind != "text" and options.endpoint == "completions":
            return token_jobs(shape, await server.vocabulary()), "tokens"
        return await text_jobs(shape, server.count), "text"
    except HttpFailure as error:
        if options.prompt_kind == "tokens":
            raise
        print(
            f"/tokenize cannot count for us ({str(error)[:120]}); one word stands for one token, "
            "see the prompt tokens in the result.",
            file=sys.stderr,
        )

    async def words(text: str) -> int:
        return len(text.split())

    return await text_jobs(shape, words), "words"


def _document(options: argparse.Namespace, report: Report, model: str, kind: str) -> dict[str, Any]:
    settings = {
        name: value for name, value in vars(options).items() if name not in ("api_key", "json")
    }
    rate = settings["request_rate"]
    if rate is not None and math.isinf(rate):
        settings["request_rate"] = "inf"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "client": f"gaudiserve {VERSION}",
        "settings": {**settings, "model": model, "prompt_kind": kind},
        **as_dict(report),
    }
