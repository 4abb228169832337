"""`gaudiserve run-batch`: flags, and execution of a batch."""

import argparse
import asyncio
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO

import uvloop

from config import log
from config.checkpoint.demo import NAMES
from config.errors import CommandFailed, counted
from config.loading.parser import FlagParser, number
from config.loading.sources import Loaded, load
from config.progress import CountBar
from server.cli.batch_files import (
    MAX_LINE_BYTES,
    BatchLine,
    BatchOutput,
    InvalidLine,
    open_input,
    read_lines,
)
from server.cli.flags import command_parser, refuse_address, refuse_settings
from server.cli.http_client import (
    MODELS_PATH,
    HttpClient,
    HttpFailure,
    HttpResponse,
    add_base_url,
    key_for,
)
from server.cli.main import log_spellings
from server.cli.private_server import PrivateServer, quiet
from server.cli.selftest import served

DESCRIPTION = """\
Answer a file of requests in OpenAI's batch format: each line of FILE is an object with custom_id,
method (POST), url (such as /v1/chat/completions) and body. The output has a line for each request,
in the order in which the answers arrive. After the command was stopped or killed, run it again: it
keeps the answers of the output file and sends the other requests.
"""
DEFAULT_CONCURRENCY = 256
RETRY_S = 1.0
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0
BUSY = 503
MAX_SENT_BYTES = MAX_LINE_BYTES
"""No line is read while more than this many bytes of lines are in flight: decoded lines take many
times their size."""


def batch_parser() -> FlagParser:
    """Parser with the flags of `serve` and the flags of the batch."""
    parser = command_parser("gaudiserve run-batch", DESCRIPTION)
    parser.usage = "gaudiserve run-batch [MODEL] -i FILE -o FILE [flags]"
    parser.examples = (
        "gaudiserve run-batch /data/model -i requests.jsonl -o answers.jsonl",
        "gaudiserve run-batch --base-url http://localhost:8000 -i requests.jsonl -o answers.jsonl",
    )
    group = parser.add_argument_group("Batch")
    add = group.add_argument
    add("-i", "--input-file", required=True, metavar="FILE", help="File of requests, one per line")
    add(
        *("-o", "--output-file"),
        required=True,
        metavar="FILE",
        help="File for the answers, one per line; a request with an answer in this file is not "
        "sent again",
    )
    add_base_url(group)
    add(
        "--max-concurrent-requests",
        type=number(int, minimum=1),
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help=f"Maximum concurrent requests [{DEFAULT_CONCURRENCY}]",
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the batch; returns 0 once each line has a response, errors included. Raises ConfigError,
    CommandFailed, and the errors of PrivateServer.wait_ready."""
    loaded = load(argv, default_model=NAMES[0], parser=batch_parser())
    arguments = loaded.arguments
    if arguments.base_url is None:
        refuse_address(loaded)
    else:
        refuse_settings(loaded, "each line of the input names a model of the running server")
    log.setup("run-batch", loaded.server.log)
    log_spellings(loaded)
    with (
        # Opened before the output, which would be created for a missing input too.
        open_input(Path(arguments.input_file)) as file,
        BatchOutput(Path(arguments.output_file)) as output,
    ):
        lines = _unanswered(file, output)
        if output.num_answered:
            verb = "is" if output.num_answered == 1 else "are"
            count = counted(output.num_answered, "line")
            _say(f"{count} of {arguments.output_file} {verb} already answered")
        uvloop.run(_run(loaded, arguments, lines, output))
        count = counted(output.num_answered, "line")
        print(f"{count} answered, {output.num_errors} of them with an error")
    return 0


def _unanswered(file: IO[bytes], output: BatchOutput) -> Iterator[BatchLine | InvalidLine]:
    return (line for line in read_lines(file) if not output.has(line))


async def _run(
    loaded: Loaded,
    arguments: argparse.Namespace,
    lines: Iterator[BatchLine | InvalidLine],
    output: BatchOutput,
) -> None:
    first = next(lines, None)
    if first is None:
        return
    server = None
    if arguments.base_url is None:
        server = PrivateServer(served(loaded, loaded, batch_parser()).engine, quiet(loaded))
    key = key_for(loaded.server.api_keys, arguments.base_url)
    client = HttpClient(arguments.base_url or server_url(server), key)
    try:
        if server is not None:
            await server.show_until_ready(client)
        else:
            # Check the key and the URL first: if wrong, every line would get a permanent error.
            await client.call("GET", MODELS_PATH)
        await _answer_all(client, chain([first], lines), output, arguments.max_concurrent_requests)
    except HttpFailure as error:
        raise CommandFailed(f"{error}; run the same command again to continue") from error
    finally:
        await client.close()
        if server is not None:
            await asyncio.get_running_loop().run_in_executor(None, server.close)


def server_url(server: PrivateServer | None) -> str:
    assert server is not None, "there is a URL or a server"
    return server.url


async def _answer_all(
    client: HttpClient,
    lines: Iterator[BatchLine | InvalidLine],
    output: BatchOutput,
    num_at_once: int,
) -> None:
    """Send all lines, with at most `num_at_once` lines and about MAX_SENT_BYTES in flight; the
    first connection failure ends the batch."""
    bar = CountBar(desc="requests", unit="line", disable=None)
    num_sent_bytes = 0
    has_room = asyncio.Condition()

    def may_send() -> bool:
        return num_sent_bytes <= MAX_SENT_BYTES

    async def work() -> None:
        nonlocal num_sent_bytes
        while True:
            async with has_room:
                await has_room.wait_for(may_send)
                try:
                    line = next(lines)
                except StopIteration:
                    return
            if isinstance(line, InvalidLine):
                output.write_error(line)
            else:
                num_sent_bytes += line.num_bytes
                output.write(line, await _ask(client, line))
                num_sent_bytes -= line.num_bytes
                async with has_room:
                    has_room.notify_all()
            bar.update()

    with bar:
        workers = [asyncio.create_task(work()) for _ in range(num_at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


async def _ask(client: HttpClient, line: BatchLine) -> HttpResponse:
    while True:
        answer = await client.ask("POST", line.url, line.body)
        if answer.status != BUSY:
            return answer
        await asyncio.sleep(retry_s(answer.fields.get("retry-after", "")))


def retry_s(retry_after: str) -> float:
    """Seconds to wait according to a Retry-After header, from MIN_RETRY_S to MAX_RETRY_S; RETRY_S
    if it is not a number."""
    is_number = retry_after.isascii() and retry_after.isdecimal()
    return max(MIN_RETRY_S, min(float(retry_after), MAX_RETRY_S)) if is_number else RETRY_S


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
