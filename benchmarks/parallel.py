"""Cost and gain of several devices and several engines on this host.

    python benchmarks/parallel.py
    python benchmarks/parallel.py engine router --markdown parallel.md

Four parts, all by default:

engine  a step of 256 requests with 1, 2, 4 and 8 workers whose simulated devices take 5 ms a step:
        CPU time of the engine, and utilization of the devices
tensor  a random model on the CPU, `-tp 2` compared with one process on the same cores, alternating
data    two engines with simulated devices compared with one engine: requests per second
router  prefix hits of chats on four engines compared with one engine that has all of the cache"""

import argparse
import asyncio
import dataclasses
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.checkpoints import CONFIGS
from benchmarks.host_processes import watch_steps
from benchmarks.host_rig import make_config
from benchmarks.machine import machine
from benchmarks.null_device import null_engine_command
from benchmarks.router import RoundRobin, Traffic, simulate
from config.data_parallel import DataParallelConfig
from config.log import LogConfig
from config.params.sampling import SamplingParams
from engine.client.router import RouterClient
from engine.transport.messages import UNSENT, AddRequest
from gaudiserve import LLM
from server.offline.engines import ProcessesClient

WORKERS = (1, 2, 4, 8)
ROWS, STEP_S, STEPS = 256, 0.005, 600
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 128, 128
LAYERS = 8
"""Layers of the random model: the dense shape of checkpoints.py with fewer layers."""
DATA_ROWS, DATA_STEP_S, DATA_OUTPUT = 32, 0.02, 50
GOALS = {
    "engine": "engine's CPU time with 8 workers over 1: at most 1.15; busy at least 98 %",
    "tensor": "at least 0.9",
    "data": "at least 1.9",
    "router": "at least 90 %",
}
Rows = list[list[str]]


def engine_rows(repeats: int) -> Rows:
    """Steps of 256 requests: the minimum of `repeats` runs for each number of workers."""
    runs = {
        workers: [
            asyncio.run(watch_steps(ROWS, STEP_S, STEPS, num_workers=workers))
            for _ in range(repeats)
        ]
        for workers in WORKERS
    }
    found: Rows = [["workers", "engine, us", "over 1", "sockets, us", "busy", "busy, median step"]]
    alone = min(run.engine_s for run in runs[1])
    for workers, steps in runs.items():
        engine_s = min(step.engine_s for step in steps)
        sockets_s = min(step.sockets_s for step in steps)
        found.append(
            [
                f"{workers}",
                f"{engine_s * 1e6:.0f}",
                f"{engine_s / alone:.2f}",
                f"{sockets_s * 1e6:.0f}",
                f"{STEP_S / min(mean(step.seconds) for step in steps):.1%}",
                f"{STEP_S / min(median(step.seconds) for step in steps):.1%}",
            ]
        )
    return found


def rate_rows(what: str, unit: str, rates: dict[int, list[float]]) -> Rows:
    """The median rate for each number of `what`, and its ratio to the rate for 1."""
    alone = median(rates[1])
    medians = {count: median(found) for count, found in rates.items()}
    return [
        [what, unit, "over 1"],
        *([f"{count}", f"{rate:.1f}", f"{rate / alone:.2f}"] for count, rate in medians.items()),
    ]


def tensor_rows(repeats: int) -> Rows:
    """Tokens per second of 32 streams; each measurement has its own process."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(repeats):
        for size, found in rates.items():
            command = [sys.executable, __file__, "--measure-model", f"{size}"]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found.append(float(output.splitlines()[-1]))
    return rate_rows("processes", "tokens/s", rates)


def measure_model(size: int) -> float:
    """Output tokens per second of a random model that `size` processes compute."""
    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIGS["dense"], "num_hidden_layers": LAYERS}
        Path(folder, "config.json").write_text(json.dumps(config))
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=size,
            max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS,
            max_num_seqs=STREAMS,
            enable_prefix_caching=False,
            device="cpu",
        )
        params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0)
        prompts = [
            {"prompt_token_ids": [3 + (17 * row + 31 * at) % 40_000 for at in range(PROMPT_TOKENS)]}
            for row in range(STREAMS)
        ]
        llm.generate(prompts[:2], SamplingParams(max_tokens=4, ignore_eos=True))
        start = time.perf_counter()
        llm.generate(prompts, params)
        return STREAMS * OUTPUT_TOKENS / (time.perf_counter() - start)


async def requests_per_s(num_engines: int, num_requests: int) -> float:
    """Requests per second of `num_engines` engines with simulated devices, with 25 % more requests
    than rows. The first and the last requests, one for each row, are not counted, so that all rows
    are in use."""
    config = dataclasses.replace(
        make_config(DATA_ROWS, PROMPT_TOKENS + DATA_OUTPUT + 8),
        data_parallel=DataParallelConfig(data_parallel_size=num_engines),
    )
    client = ProcessesClient(config, LogConfig("warning"), command=null_engine_command(DATA_STEP_S))
    params = SamplingParams(max_tokens=DATA_OUTPUT, ignore_eos=True)
    num_rows = DATA_ROWS * num_engines
    at_once = asyncio.Semaphore(num_rows + num_rows // 4)
    ends: list[float] = []

    async def ask(number: int) -> None:
        async with at_once:
            queue = client.add(
                AddRequest(
                    UNSENT, memoryview(bytes(4 * PROMPT_TOKENS)), params, cache_salt=str(number)
                )
            )
            while not (await queue.get()).finish:
                pass
        ends.append(time.perf_counter())

    await client.start()
    try:
        await asyncio.wait_for(client.wait_ready(), 60)
        await asyncio.gather(*(ask(number) for number in range(2 * num_engines)))
        ends.clear()
        await asyncio.gather(*(ask(number) for number in range(num_requests * num_engines)))
        steady = ends[num_rows - 1 : -num_rows]
        return (len(steady) - 1) / (steady[-1] - steady[0])
    finally:
        await client.close()


def data_rows(repeats: int) -> Rows:
    """Requests per second of a single engine and of two, in alternating runs."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(repeats):
        for engines, found in rates.items():
            found.append(asyncio.run(requests_per_s(engines, 8 * DATA_ROWS)))
    return rate_rows("engines", "requests/s", rates)


def router_rows(repeats: int) -> Rows:
    """Prefix hits of simulated chats, which are deterministic and need no repeats."""
    del repeats
    traffic, num_blocks = Traffic(), 8000
    large = simulate(1, num_blocks, traffic, max_num_seqs=128)
    found: Rows = [["engines", "prefix hits", "over one large engine"]]
    routers: tuple[tuple[str, type[RouterClient]], ...] = (
        ("4, router", RouterClient),
        ("4, round robin", RoundRobin),
    )
    for name, router in routers:
        rate = simulate(4, num_blocks, traffic, router=router).hit_rate
        found.append([name, f"{rate:.1%}", f"{rate / large.hit_rate:.1%}"])
    return [*found, ["1 large", f"{large.hit_rate:.1%}", "100.0%"]]


PARTS: dict[str, Callable[[int], Rows]] = {
    "engine": engine_rows,
    "tensor": tensor_rows,
    "data": data_rows,
    "router": router_rows,
}


def markdown(name: str, rows: Rows) -> str:
    """A heading, the goal and the table of a part."""
    head, *rest = rows
    lines = [head, ["---:"] * len(head), *rest]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {name}\n\nGoal: {GOALS[name]}.\n\n{table}\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="part to run; default: all parts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--measure-model", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure_model:
        print(measure_model(given.measure_model))
        return
    text = f"# Several devices, {datetime.date.today().isoformat()}\n\n{machine()}\n"
    for name in given.parts or PARTS:
        part = markdown(name, PARTS[name](given.repeats))
        print(part, flush=True)
        text += f"\n{part}"
    if given.markdown:
        given.markdown.write_text(text)


if __name__ == "__main__":
    main()
