"""Servers that answer edits and quotes of texts in their prompts (quoting.json), greedily with a
single stream: the gain of speculation, beside other servers.

    python benchmarks/quoting.py \
        --server 'without=gaudiserve serve demo --port {port}' \
        --server 'ngram=gaudiserve serve demo --port {port} --speculative-model [ngram]
            --num-speculative-tokens 8'

Each server is started by its command, and stopped before the next one starts. The first turn warms
up and is not counted. Answers of two servers may differ in length; each server's rate counts its
own tokens. Run nothing else at the same time.
"""

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.asked import ask, quoting_messages
from benchmarks.machine import machine
from benchmarks.started import started


class Measured(NamedTuple):
    """Results of a server."""

    name: str
    command: str
    rates: list[float]
    """Output tokens per second of each turn after the first."""
    num_tokens: int
    """Output tokens of the last turn."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--model", help="model of the requests; default: the first listed model")
    parser.add_argument("--max-tokens", type=int, default=256, help="maximum tokens of an answer")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    measured: list[Measured] = []
    for argument in args.server:
        name, command = argument.split("=", 1)
        measured.append(measure(name, command, args.model, args.max_tokens, args.turns))
        last = measured[-1]
        print(f"{name}: {[round(rate, 1) for rate in last.rates]}", file=sys.stderr, flush=True)
    print(table(measured))
    if args.out is not None:
        facts = {"machine": machine(), "date": datetime.date.today().isoformat()}
        servers = [row._asdict() for row in measured]
        args.out.write_text(json.dumps({**facts, "servers": servers}, indent=1) + "\n")


def measure(name: str, command: str, model: str | None, max_tokens: int, turns: int) -> Measured:
    """Start a server and send it all chats `turns` + 1 times, one chat after the other."""
    rates, num_tokens = [], 0
    with started(command, model) as server:
        options = {"model": model or server.model, "max_tokens": max_tokens, "temperature": 0}
        for turn in range(turns + 1):
            num_tokens, seconds = 0, 0.0
            for messages in quoting_messages():
                body: dict[str, object] = {**options, "messages": messages}
                tokens, took_s = ask(server.port, "/v1/chat/completions", [body])
                num_tokens, seconds = num_tokens + tokens, seconds + took_s
            if turn:
                rates.append(num_tokens / seconds)
    return Measured(name, command, rates, num_tokens)


def table(measured: list[Measured]) -> str:
    """Markdown table of the servers' median rates, and their ratios to the first server's rate."""
    first = statistics.median(measured[0].rates)
    lines = [
        f"{datetime.date.today().isoformat()}, {machine()}.",
        "",
        "| server | tokens/s, median | least | most | ratio | tokens of a turn |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in measured:
        rate = statistics.median(row.rates)
        lines.append(
            f"| {row.name} | {rate:.1f} | {min(row.rates):.1f} | {max(row.rates):.1f} "
            f"| {rate / first:.2f} | {row.num_tokens} |"
        )
    return "\n".join([*lines, "", *(f"- {row.name}: `{row.command}`" for row in measured)])


if __name__ == "__main__":
    main()
