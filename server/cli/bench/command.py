"""`gaudiserve bench serve`: one run, and what is printed. Knows no HTTP."""

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

from config.errors import ConfigError
from config.loading.env import environment
from config.version import VERSION
from server.cli.bench.load import closed_loop, open_loop
from server.cli.bench.openai import OpenAIServer, Outcome, first_model
from server.cli.bench.options import read
from server.cli.bench.report import Report, as_dict, as_text, summarise
from server.cli.bench.target import HttpFailure, Target
from server.cli.bench.workload import Job, Shape, gaps, text_jobs, token_jobs


def main(argv: Sequence[str]) -> int:
    """0, or 1 when a request failed. Raises ConfigError for wrong flags or an unusable server."""
    options = read(argv)
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
