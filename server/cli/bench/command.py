"""`gaudiserve bench serve`: generates load and prints the report."""

import argparse
import asyncio
import datetime
import json
import math
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from config.errors import CommandFailed, ConfigError
from config.loading.env import environment
from config.progress import CountBar
from config.version import VERSION
from server.cli.bench.openai import OpenAIServer, Outcome, first_model
from server.cli.bench.options import SAMPLING, read
from server.cli.bench.report import Report, as_dict, as_text, summarise
from server.cli.bench.workload import (
    BenchRequest,
    CountTokens,
    Shape,
    arrival_gaps,
    count_words,
    read_sharegpt,
    sharegpt_requests,
    text_requests,
    token_requests,
)
from server.cli.http_client import KEY_VARIABLE, HttpClient, HttpFailure, MissingModel

Send = Callable[[BenchRequest], Awaitable[Outcome]]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns 1 if a measured request failed or none completed, otherwise 0.
    Raises ConfigError and CommandFailed."""
    options = read(argv)
    turns = read_sharegpt(options.dataset_path) if options.dataset_path else []
    try:
        report, model, kind = uvloop.run(_run(options, turns))
    except HttpFailure as error:
        raise CommandFailed(str(error)) from None
    table = as_text(report, options.percentile_metrics)
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
        raise ConfigError(f"--json is {path!r}, it cannot be written: {error}") from None


async def _run(
    options: argparse.Namespace, turns: list[tuple[str, str]]
) -> tuple[Report, str, str]:
    key = options.api_key or environment().get(KEY_VARIABLE)
    client = HttpClient(options.base_url, key, options.header)
    try:
        model = options.served_model_name or options.model or await first_model(client)
        server = OpenAIServer(
            client,
            options.endpoint,
            model,
            _fields(options),
            request_usage=not options.no_stream_usage,
        )
        requests, kind = await _requests(server, options, turns)
        warmups = options.num_warmups
        for request in requests[:warmups]:
            await server.send(request, options.timeout)
        outcomes = await _load(server, requests[warmups:], options)
        return summarise(outcomes, options.metric_percentiles), model, kind
    finally:
        await client.close()


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    names = [name.replace("-", "_") for name in ("temperature", *SAMPLING)]
    given = {name: getattr(options, name) for name in names}
    if options.logprobs is not None and options.endpoint == "chat":
        given |= {"logprobs": True, "top_logprobs": options.logprobs}
    fields = {name: value for name, value in given.items() if value is not None}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    return {**fields, **options.extra_body}


async def _load(
    server: OpenAIServer, requests: list[BenchRequest], options: argparse.Namespace
) -> list[Outcome]:
    async def send(request: BenchRequest) -> Outcome:
        return await server.send(request, options.timeout)

    # None: show the progress bar only on a terminal.
    disable = options.quiet or None
    with CountBar(total=len(requests), unit="req", disable=disable, file=sys.stderr) as bar:

        def on_done() -> None:
            bar.update(1)

        if options.request_rate is None:
            return await closed_loop(send, requests, options.max_concurrency or 8, on_done)
        gaps_s = arrival_gaps(options.request_rate, len(requests), options.seed, options.burstiness)
        return await open_loop(send, requests, gaps_s, options.max_concurrency, on_done)


async def closed_loop(
    send: Send,
    requests: Sequence[BenchRequest],
    concurrency: int,
    on_done: Callable[[], None],
) -> list[Outcome]:
    """Send all requests, at most `concurrency` at a time; `on_done` is called after each
    request."""
    waiting = iter(requests)
    outcomes: list[Outcome] = []

    async def client() -> None:
        for request in waiting:
            outcomes.append(await send(request))
            on_done()

    await _gather(asyncio.ensure_future(client()) for _ in range(min(concurrency, len(requests))))
    return outcomes


async def open_loop(
    send: Send,
    requests: Sequence[BenchRequest],
    gaps_s: Iterable[float],
    max_concurrency: int | None,
    on_done: Callable[[], None],
) -> list[Outcome]:
    """Send each request after its gap without waiting for earlier requests, but with at most
    `max_concurrency` in flight."""
    slots = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    outcomes: list[Outcome] = []

    async def run(request: BenchRequest) -> None:
        async with slots:
            outcomes.append(await send(request))
            on_done()

    tasks: list[asyncio.Future[None]] = []
    try:
        # Absolute times, so that a late wake-up shortens the next gap.
        send_at_s = asyncio.get_running_loop().time()
        for request, gap_s in zip(requests, gaps_s, strict=True):
            send_at_s += gap_s
            await asyncio.sleep(max(0.0, send_at_s - asyncio.get_running_loop().time()))
            tasks.append(asyncio.ensure_future(run(request)))
    finally:
        await _gather(tasks)
    return outcomes


async def _gather(tasks: Iterable["asyncio.Future[None]"]) -> None:
    """Wait for all tasks; if a task fails or the caller is cancelled, cancel the others."""
    running = list(tasks)
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _requests(
    server: OpenAIServer, options: argparse.Namespace, turns: list[tuple[str, str]]
) -> tuple[list[BenchRequest], str]:
    """Returns (requests, how their lengths were determined: tokens, text, or words)."""
    shape = Shape(
        options.num_prompts + options.num_warmups,
        options.random_input_len,
        options.random_output_len,
        options.random_range_ratio,
        options.shared_prefix_len,
        options.seed,
    )

    async def texts(count_prompt: CountTokens, count: CountTokens) -> list[BenchRequest]:
        if turns:
            return await sharegpt_requests(turns, shape, options.sharegpt_output_len, count)
        return await text_requests(shape, count_prompt)

    can_send_ids = options.prompt_kind != "text" and options.endpoint == "completions"
    try:
        if can_send_ids and not turns:
            return token_requests(shape, await server.vocabulary()), "tokens"
        return await texts(server.count_prompt, server.count), "text"
    except MissingModel:
        raise
    except HttpFailure as error:
        if options.prompt_kind == "tokens":
            raise
        print(
            f"/tokenize cannot count tokens ({error}); each word counts as one token.",
            file=sys.stderr,
        )
    return await texts(count_words, count_words), "words"


def _document(options: argparse.Namespace, report: Report, model: str, kind: str) -> dict[str, Any]:
    settings = {
        name: value
        for name, value in vars(options).items()
        if name not in ("api_key", "header", "json")
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
