"""Cost of a decode step on the worker's thread, separately for host logic and launching, on a
device with captured graphs. The model is tiny and random; the step plans are constants. A second
table has the host time per token, including the engine's time, with several decodes in a step.

    python benchmarks/launch.py --json launch.json --markdown launch.md   (--device cuda: a GPU)

On the emulator, calls of the runtime are emulated in Python, and a replay computes on the CPU. The
times of both are reported separately and say nothing about a card; each batch size is measured a
second time with replays that return at once. On other devices, a call of the runtime counts as part
of its caller.
"""

import argparse
import datetime
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cuda_decode import SHAPES, Decoding, random_model
from benchmarks.host_rig import watch_decodes
from benchmarks.machine import machine
from benchmarks.stopwatch import Stopwatch
from config.engine import EngineConfig
from config.errors import ConfigError
from hpu.backends.base import Backend
from hpu.backends.cuda import CudaBackend, CudaGraph
from hpu.backends.gaudi import GaudiBackend, HpuGraph
from hpu.backends.select import select_backend
from hpu.emulator.api.wrap import GraphedFunction
from hpu.emulator.card.device import EmulatedDevice
from hpu.emulator.card.graphs import HPUGraph
from hpu.emulator.card.recipes import Recipes
from hpu.emulator.card.streams import CardEvent
from hpu.emulator.card.work_queue import WorkQueue
from hpu.models.decoder import Decoder
from hpu.runner.async_output import AsyncStepOutput
from hpu.runner.batch_state import BatchState
from hpu.runner.graph_cache import CapturingGraphCache, GraphCache
from hpu.runner.input_buffers import InputBufferPool, InputBuffers
from hpu.runner.model_runner import ModelRunner
from hpu.runner.sampler_graphs import SamplerGraph, SamplerGraphs
from hpu.sampling.sampler import Sampler

LOGIC, GRAPH, CALLS, SAMPLING, REST = "logic", "graph", "calls", "sampling", "rest"
RUNTIME, COMPUTED, WAITING = "runtime", "computed", "waiting"
REPLAY = "replayV3"
LAUNCH = (GRAPH, CALLS, SAMPLING, REST)
OURS = (LOGIC, *LAUNCH)

WATCHED: tuple[tuple[type, str, str], ...] = (
    (ModelRunner, "_apply", LOGIC),
    (InputBufferPool, "get", LOGIC),
    (InputBuffers, "host_arrays", LOGIC),
    (BatchState, "fill_decode", LOGIC),
    (InputBuffers, "upload", LOGIC),
    (ModelRunner, "collect", LOGIC),
    (GraphCache, "run", GRAPH),
    (CapturingGraphCache, "run", GRAPH),
    (HpuGraph, "replay", GRAPH),
    (CudaGraph, "replay", GRAPH),
    *(
        (backend, name, CALLS)
        for backend in (GaudiBackend, CudaBackend)
        for name in ("upload", "event", "to_host")
    ),
    (GaudiBackend, "mark_step", CALLS),
    (Decoder, "logits", SAMPLING),
    (Sampler, "sample", SAMPLING),
    (Sampler, "begin_fused", SAMPLING),
    (SamplerGraphs, "find", SAMPLING),
    (SamplerGraph, "run", SAMPLING),
    (ModelRunner, "_sample", SAMPLING),
    (ModelRunner, "submit", REST),
    (AsyncStepOutput, "wait", WAITING),
    (GraphedFunction, "__call__", RUNTIME),
    (HPUGraph, REPLAY, RUNTIME),
    (EmulatedDevice, "run", RUNTIME),
    (EmulatedDevice, "close_segment", RUNTIME),
    (Recipes, "launch", RUNTIME),
    (CardEvent, "record", RUNTIME),
    (CardEvent, "query", RUNTIME),
    (CardEvent, "synchronize", RUNTIME),
    (WorkQueue, "complete_until", RUNTIME),
    (EmulatedDevice, "kernel", COMPUTED),
)
"""The timed methods, each with the part that it counts for."""

WARM_STEPS = 4
ENGINE_STEPS = 200
"""Measured steps of the engine, which cost less than a step of the worker."""
MICROSECONDS = 1e6
COUNTED = {
    "HpuGraph.replay": "graphs replayed",
    "CudaGraph.replay": "graphs replayed",
    "EmulatedDevice.run": "operators beside the graphs, views included",
    "Recipes.launch": "recipes launched for them",
    "GaudiBackend.upload": "copies to the device",
    "CudaBackend.upload": "copies to the device",
    "GaudiBackend.to_host": "copies to the host",
    "CudaBackend.to_host": "copies to the host",
    "CardEvent.record": "events recorded",
    "CudaBackend.event": "events recorded",
}
Numbers = dict[str, float]


@contextmanager
def returning_at_once() -> Iterator[None]:
    """Make graph replays of the emulated card do nothing: outputs keep their values."""
    before = getattr(HPUGraph, REPLAY)
    setattr(HPUGraph, REPLAY, lambda graph, tensors: None)
    try:
        yield
    finally:
        setattr(HPUGraph, REPLAY, before)


def measure(
    backend: Backend,
    num_rows: int,
    context: int,
    num_steps: int,
    *,
    computes: bool,
    decodes: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Numbers, Numbers]:
    """Median microseconds of a step by part, with StepResult.host_s as `reported`; and the number
    of calls per step, for `num_rows` requests of `context` tokens. With `computes` off (emulator
    only), replays do nothing. `decodes`: decodes in a step. `clock`: clock of the parts."""
    total = WARM_STEPS + num_steps
    model = random_model(SHAPES["tiny"], backend, torch.float32, context + total * decodes + 2)
    decoding = Decoding(
        model,
        backend,
        num_rows=num_rows,
        context=context,
        num_steps=total,
        captures=True,
        decodes=decodes,
    )
    for _ in decoding.steps(WARM_STEPS):
        pass
    if not decoding.is_captured:
        raise SystemExit(f"a decode of batch {num_rows} was not captured: out of memory")
    steps: list[Numbers] = []
    calls: Counter[str] = Counter()
    with nullcontext() if computes else returning_at_once(), Stopwatch(clock) as stopwatch:
        for owner, name, _ in WATCHED:
            stopwatch.watch(owner, name)
        for result in decoding.steps(num_steps):
            seconds, called = stopwatch.take()
            steps.append({**by_part(seconds), "reported": result.host_s})
            calls += called
    # A new Decoding captures its own graphs.
    backend.begin_warmup()
    # The first step submits two plans, and the last step submits no plan.
    middle = steps[1:-1]
    found = {part: median(step[part] for step in middle) * MICROSECONDS for part in middle[0]}
    found["launch"] = median(sum(step[part] for part in LAUNCH) for step in middle) * MICROSECONDS
    counts = {COUNTED[name]: count / num_steps for name, count in calls.items() if name in COUNTED}
    return {"rows": num_rows, "computes": computes, **found}, counts


def by_part(seconds: dict[str, float]) -> Numbers:
    """Seconds by part, from the seconds by method."""
    parts = {f"{owner.__name__}.{name}": part for owner, name, part in WATCHED}
    found = dict.fromkeys(parts.values(), 0.0)
    for name, taken in seconds.items():
        found[parts[name]] += taken
    return found


def measure_decodes(
    backend: Backend, num_rows: int, options: argparse.Namespace
) -> Iterator[Numbers]:
    """Microseconds of CPU time per token of all requests, for each number of decodes in a step: the
    worker's thread, and the engine from a result to the next plan. The minimum of several
    alternating runs."""
    computes = options.device != "hpu-emulator"
    worker = dict.fromkeys(options.decodes, float("inf"))
    engine = worker.copy()
    for _ in range(options.repeats):
        for decodes in options.decodes:
            found, _ = measure(
                *(backend, num_rows, options.context, options.steps),
                computes=computes,
                decodes=decodes,
                clock=time.thread_time,
            )
            worker[decodes] = min(worker[decodes], found[LOGIC] + found["launch"])
            times = watch_decodes(num_rows, 0, options.context, ENGINE_STEPS, decodes=decodes)
            engine[decodes] = min(engine[decodes], median(times.cpu) * MICROSECONDS)
    for decodes in options.decodes:
        each = {"worker": worker[decodes] / decodes, "engine": engine[decodes] / decodes}
        yield {"rows": num_rows, "decodes": decodes, **each, "both": sum(each.values())}


def decodes_table(lines: list[Numbers]) -> str:
    found = [
        "",
        "Microseconds of CPU time per token of all rows, by the decodes in a step "
        "(`--num-scheduler-steps`): the worker's thread (host logic and launching) and the "
        "engine from a result to the next plan.",
        "",
        "| rows | decodes in a step | worker | engine | both |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for line in lines:
        cells = " | ".join(f"{line[name]:.0f}" for name in ("worker", "engine", "both"))
        found.append(f"| {line['rows']:.0f} | {line['decodes']:.0f} | {cells} |")
    return "\n".join(found) + "\n"


def markdown(device: str, lines: list[Numbers], counts: Numbers) -> str:
    """The tables of a step with one decode, with date and machine."""
    emulated = device == "hpu-emulator"
    columns = {
        "logic": "host logic",
        "launch": "launching",
        "graph": "lookup, replay",
        "calls": "copies, events, marks",
        "sampling": "head, sampling",
        "rest": "else",
    }
    if emulated:
        columns |= {"runtime": "emulated runtime", "computed": "computed"}
    columns["reported"] = "StepResult.host_s"
    found = [
        f"# Launching apart from host logic, {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/launch.py --device {device}`, {machine()}, torch {torch.__version__}.",
        "",
        "Microseconds of the worker's thread in a decode step: medians, of the cheapest of several "
        "runs. Launching is the sum of the four columns behind it.",
        "",
        f"| rows | a replay | {' | '.join(columns.values())} |",
        f"| ---: | --- | {' | '.join(['---:'] * len(columns))} |",
    ]
    for line in lines:
        replay = "computes" if line["computes"] else "returns at once"
        cells = " | ".join(f"{line[column]:.0f}" for column in columns)
        found.append(f"| {line['rows']:.0f} | {replay} | {cells} |")
    found += ["", "| of a step | |", "| --- | ---: |"]
    found += [f"| {name} | {count:g} |" for name, count in sorted(counts.items())]
    return "\n".join(found) + "\n"


def open_device(name: str) -> Backend:
    """The back end of `name` as a worker opens it; exits with a message on failure."""
    try:
        return select_backend(EngineConfig("none", device=name, seed=0))
    except ConfigError as error:
        raise SystemExit(str(error)) from error


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("hpu-emulator", "cuda", "hpu"), default="hpu-emulator")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each request")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--decodes", type=int, nargs="*", default=[1, 2, 4, 8], help="decodes in a step"
    )
    parser.add_argument("--repeats", type=int, default=3, help="repeats; the minimum counts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(words)
    backend = open_device(options.device)
    ways = (False, True) if options.device == "hpu-emulator" else (True,)
    lines: list[Numbers] = []
    counts: Numbers = {}
    with torch.inference_mode():
        for num_rows in options.rows:
            for computes in ways:
                runs = [
                    measure(backend, num_rows, options.context, options.steps, computes=computes)
                    for _ in range(options.repeats)
                ]
                found, counts = min(runs, key=lambda run: run[0][LOGIC] + run[0]["launch"])
                lines.append(found)
                print(json.dumps(found), file=sys.stderr, flush=True)
        by_decodes = [
            line
            for num_rows in options.rows
            for line in measure_decodes(backend, num_rows, options)
        ]
    backend.close()
    table = markdown(options.device, lines, counts) + decodes_table(by_decodes)
    print(table, end="")
    if options.markdown:
        options.markdown.write_text(table)
    if options.json:
        about = {"date": datetime.date.today().isoformat(), "machine": machine()}
        tables = {"steps": lines, "counts": counts, "decodes": by_decodes}
        text = json.dumps({**about, **tables}, indent=1)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
