"""Throughput of the API server alone: the real server with an engine on a null device.

    python benchmarks/front.py --out benchmarks/results/front-DATE
    python benchmarks/front.py --peer 'other=http://127.0.0.1:9000' --out ...
    python benchmarks/front.py --server 'NAME=COMMAND with {port}' --server ... --out ...

Measures streamed tokens, short requests, time to the first byte, the effect of a long prompt on
other streams, the memory of idle streams, and streams of several API servers. The last three are
not measured for peers and for servers with a model of their own, which are started in sequence
instead of the null engine. CPU seconds are the main figure, because other work on the cores does
not change them. Writes OUT.json and OUT.md. Run nothing else at the same time.
"""

import argparse
import contextlib
import datetime
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.front_load import Server, Stream, ask, closed_loop, read_streams, usage_of
from benchmarks.machine import machine
from benchmarks.started import started

Row = dict[str, object]
CHAT = "/v1/chat/completions"
STORY = [{"role": "user", "content": "Tell me a short story about the sea."}]


class Target:
    """Server under load: its address, and the API-server processes whose CPU time counts."""

    def __init__(self, name: str, url: str, processes: list[psutil.Process]) -> None:
        self.name, self.server, self._processes = name, Server(url), processes
        listed = self.server.get("/v1/models")["data"]
        assert isinstance(listed, list)
        self.model = listed[0]["id"]

    def body(self, max_tokens: int, *, stream: bool = True, **more: object) -> dict[str, object]:
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        fields = {"messages": STORY, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        return {"model": self.model, "stream": stream, **fields, **usage, **more}

    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    def memory_bytes(self) -> int:
        return sum(process.memory_full_info().uss for process in self._processes)

    def streams(self, count: int) -> list[Stream]:
        return [self.server.connect() for _ in range(count)]


@contextlib.contextmanager
def our_server(step_ms: float, *flags: str, num_api_servers: int = 1) -> Iterator[Target]:
    """The unchanged server with a null engine, stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("null_engine.py"))]
    command += [f"--step-ms={step_ms}", "--", f"--port={port}", "--max-num-seqs=256"]
    command += [f"--api-server-count={num_api_servers}", "--log-level=warning", *flags]
    process = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(process, url)
        children = psutil.Process(process.pid).children()
        processes = [psutil.Process(process.pid)]
        if num_api_servers > 1:
            processes = [
                item for item in children if any("API server" in w for w in item.cmdline())
            ]
        yield Target("gaudiserve", url, processes)
    finally:
        process.terminate()
        process.wait(30)


def _wait_ready(process: "subprocess.Popen[bytes]", url: str, timeout_s: float = 60) -> None:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s and process.poll() is None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            if Server(url).get("/ready").get("status") == "ready":
                return
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def tokens_out(target: Target, count: int, max_tokens: int) -> Row:
    """Results of `count` concurrent streams, from the second of two rounds."""
    streams = target.streams(count)
    request = target.server.request(CHAT, target.body(max_tokens))
    for _ in range(2):
        cpu_s, client_s, begun_s = target.cpu_s(), time.process_time(), time.perf_counter()
        for stream in streams:
            ask(stream, request)
        read_streams(streams)
        wall_s = time.perf_counter() - begun_s
        cpu_s, client_s = target.cpu_s() - cpu_s, time.process_time() - client_s
    tokens = sum(usage_of(stream) for stream in streams)
    gaps = sorted(gap for stream in streams for gap in stream.gaps_s)
    firsts = sorted(stream.first_text_s - stream.asked_s for stream in streams)
    _close(streams)
    return {
        "tokens_per_s": tokens / wall_s,
        "first_token_ms_p50": _at(firsts, 0.5) * 1e3,
        "first_token_ms_p99": _at(firsts, 0.99) * 1e3,
        "tokens_per_event": tokens / (sum(stream.events for stream in streams) or 1),
        "front_cpu_us_per_token": cpu_s / tokens * 1e6,
        "tokens_per_front_cpu_s": tokens / cpu_s if cpu_s else 0.0,
        "client_share_of_a_core": client_s / wall_s,
        "gap_ms_p50": _at(gaps, 0.5) * 1e3,
        "gap_ms_p99": _at(gaps, 0.99) * 1e3,
    }


def first_byte(target: Target, count: int) -> Row:
    """Time to first byte of streams of a single token, in sequence, on an idle server."""
    (stream,) = target.streams(1)
    request = target.server.request(CHAT, target.body(1))
    firsts, texts, tokens = [], [], []
    for _ in range(count):
        ask(stream, request)
        read_streams([stream])
        firsts.append(stream.first_byte_s - stream.asked_s)
        texts.append(stream.first_text_s - stream.asked_s)
        tokens.append(stream.reads_s[-1] - stream.asked_s)
    _close([stream])
    for times in (firsts, texts, tokens):
        times.sort()
    return {
        "first_byte_ms_p50": _at(firsts, 0.5) * 1e3,
        "first_byte_ms_p99": _at(firsts, 0.99) * 1e3,
        "first_token_ms_p50": _at(texts, 0.5) * 1e3,
        "whole_answer_ms_p50": _at(tokens, 0.5) * 1e3,
    }


def requests_in(target: Target, count: int, seconds: float) -> Row:
    """Rate of short chats of a single token in a closed loop."""
    streams = target.streams(count)
    request = target.server.request(CHAT, target.body(1, stream=False))
    closed_loop(streams, request, seconds / 4)
    cpu_s, client_s, begun_s = target.cpu_s(), time.process_time(), time.perf_counter()
    times = sorted(closed_loop(streams, request, seconds))
    wall_s = time.perf_counter() - begun_s
    cpu_s, client_s = target.cpu_s() - cpu_s, time.process_time() - client_s
    _close(streams)
    return {
        "requests_per_s": len(times) / wall_s,
        "front_cpu_us_per_request": cpu_s / len(times) * 1e6,
        "requests_per_front_cpu_s": len(times) / cpu_s if cpu_s else 0.0,
        "client_share_of_a_core": client_s / wall_s,
        "answer_ms_p50": _at(times, 0.5) * 1e3,
        "answer_ms_p99": _at(times, 0.99) * 1e3,
    }


def long_prompt(target: Target, step_ms: float, num_tokens: int) -> Row:
    """Inter-token latency of 64 streams, alone and with a prompt of `num_tokens`."""
    request = target.server.request(CHAT, target.body(300))
    long = target.body(1, messages=[{"role": "user", "content": " sea" * num_tokens}])
    results: Row = {"step_ms": step_ms}
    for name in ("alone", "beside"):
        streams = target.streams(64)
        for stream in streams:
            ask(stream, request)
        guests = target.streams(1) if name == "beside" else []
        for guest in guests:
            ask(guest, target.server.request(CHAT, long))
        read_streams(streams + guests)
        gaps = sorted(gap for stream in streams for gap in stream.gaps_s)
        results[f"gap_ms_p99_{name}"] = _at(gaps, 0.99) * 1e3
        results[f"gap_ms_most_{name}"] = gaps[-1] * 1e3
        _close(streams + guests)
    return results


def idle_streams(target: Target, count: int) -> Row:
    """Cost of `count` streams that wait for a token: memory per stream, and CPU time of all."""
    warm = target.streams(100)
    request = target.server.request(CHAT, target.body(4))
    for stream in warm:
        ask(stream, request)
    time.sleep(3)
    before = target.memory_bytes()
    streams = target.streams(count)
    for stream in streams:
        ask(stream, request)
    time.sleep(5)
    after, cpu_s = target.memory_bytes(), target.cpu_s()
    time.sleep(4)
    idle = (target.cpu_s() - cpu_s) / 4
    _close(streams + warm)
    return {"kb_per_stream": (after - before) / count / 1e3, "share_of_a_core": idle}


def _close(streams: list[Stream]) -> None:
    for stream in streams:
        stream.socket.close()


def _at(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))] if values else 0.0


def _ours(options: argparse.Namespace) -> dict[str, Row]:
    results: dict[str, Row] = {}
    with our_server(0) as target:
        results["idle: first byte"] = first_byte(target, 300)
        results["requests in, 64 connections"] = requests_in(target, 64, options.seconds)
        results["256 streams, no device time"] = tokens_out(target, 256, 400)
    for step_ms in options.step_ms:
        with our_server(step_ms) as target:
            name = f"256 streams, {step_ms:g} ms a step"
            results[name] = tokens_out(target, 256, options.tokens)
    with our_server(10) as target:
        results["a long prompt beside 64 streams"] = long_prompt(target, 10, 100_000)
    with our_server(60_000, "--max-num-seqs=4096", "--max-num-batched-tokens=8192") as target:
        results["idle streams"] = idle_streams(target, options.idle)
    if options.api_servers > 1:
        with our_server(0, num_api_servers=options.api_servers) as target:
            results[f"{options.api_servers} API servers, 256 streams"] = tokens_out(
                target, 256, 400
            )
    return results


def _peers(options: argparse.Namespace) -> dict[str, dict[str, Row]]:
    results = {}
    for argument in options.peer:
        name, _, rest = argument.partition("=")
        url, _, pids = rest.partition(",")
        processes = [psutil.Process(int(pid)) for pid in pids.split(",") if pid]
        target = Target(name, url, processes)
        streams = "256 streams" if options.server else "256 streams, no device time"
        results[name] = _measure_all(target, options.seconds, streams)
    return results


def _started(options: argparse.Namespace) -> dict[str, dict[str, Row]]:
    """Results of servers with a model; the process of the command counts as the API server."""
    results = {}
    for argument in options.server:
        name, _, command = argument.partition("=")
        with started(command) as server:
            url = f"http://127.0.0.1:{server.port}"
            target = Target(name, url, [psutil.Process(server.pid)])
            results[name] = _measure_all(target, options.seconds, "256 streams")
    return results


def _measure_all(target: Target, seconds: float, streams: str) -> dict[str, Row]:
    return {
        "idle: first byte": first_byte(target, 100),
        "requests in, 64 connections": requests_in(target, 64, seconds),
        streams: tokens_out(target, 256, 200),
    }


def _markdown(results: dict[str, dict[str, Row]]) -> str:
    names = list(results)
    lines = [
        f"{datetime.date.today()}, {machine()}; in brackets the ratio to {names[0]}.",
        "",
        "| what | figure | " + " | ".join(names) + " |",
        "| --- | --- |" + " ---: |" * len(names),
    ]
    for what, row in results[names[0]].items():
        for figure, value in row.items():
            cells = [f"{value:.4g}"]
            for name in names[1:]:
                other = results[name].get(what, {}).get(figure)
                shown = isinstance(other, float) and isinstance(value, float) and value
                cells.append(f"{other:.4g} ({other / value:.2f})" if shown else "-")  # type: ignore[operator]
            lines.append(f"| {what} | {figure} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, metavar="PATH")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[4.0, 6.0])
    parser.add_argument("--tokens", type=int, default=800, help="tokens of a stream")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of the short requests")
    parser.add_argument("--idle", type=int, default=2000, help="number of idle streams")
    parser.add_argument(
        "--api-servers", type=int, default=4, help="number of API servers in the last part"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL[,PID...]")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND")
    options = parser.parse_args()
    ours = _started(options) if options.server else {"gaudiserve": _ours(options)}
    results = {**ours, **_peers(options)}
    report = _markdown(results)
    print(report)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{out}.md").write_text(report)
    facts = {"machine": machine(), "date": str(datetime.date.today()), "results": results}
    Path(f"{out}.json").write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
