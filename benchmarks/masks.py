"""Gain of late grammar masks: guided requests on a simulated device, with and without overlap.

A decode takes `--device-ms` without a model; the host computes masks in parallel. The grammars and
the engine are real. Run: python benchmarks/masks.py FOLDER
"""

import argparse
import sys
import time
from array import array
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.buckets import BucketConfig
from config.engine import EngineConfig, SchedulerConfig
from config.model.read_config import read_model_config
from config.params.sampling import SamplingParams
from config.params.structured_output import GrammarSpec
from engine.core.build import build_core
from engine.structured_output.grammar import Grammar, Vocabulary
from engine.transport.messages import AddRequest
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import (
    DECODE,
    BucketLimits,
    FromWorker,
    GrammarMasks,
    StepPlan,
    StepResult,
    ToWorker,
    WorkerReady,
)

FORM = GrammarSpec(
    "json",
    '{"type":"array","minItems":500,"items":{"type":"object","properties":{"name":'
    '{"type":"string","maxLength":20},"kind":{"enum":["a","b"]},"size":{"type":"integer"}},'
    '"required":["name","kind","size"]}}',
)
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 16384, 4096
WARM_STEPS = 20
PROMPT = memoryview(array("I", range(10, 42)).tobytes())


class ClockExecutor:
    """A simulated device: takes `step_s` per plan, in sequence; samples any allowed token."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._free_at = 0.0
        self._plans: deque[tuple[StepPlan, dict[int, memoryview]]] = deque()
        self._done_at: deque[float] = deque()
        self._random = np.random.default_rng(0)

    def send(self, message: ToWorker) -> None:
        if isinstance(message, GrammarMasks):
            self._take_masks(message)
        elif isinstance(message, StepPlan):
            self._submit(message)

    def receive(self, *, waits: bool = False) -> list[FromWorker]:
        return [self._collect()] if self._done_at and (waits or self._is_done()) else []

    def _submit(self, plan: StepPlan) -> None:
        self._free_at = max(self._free_at, time.perf_counter()) + self._step_s
        self._plans.append((plan, _by_row(plan.masked_requests, plan.masks)))
        self._done_at.append(self._free_at)

    def _take_masks(self, masks: GrammarMasks) -> None:
        self._plans[-1][1].update(_by_row(masks.req_indices, masks.masks))
        # Sampling takes no time, but starts when the masks arrive.
        self._free_at = self._done_at[-1] = max(self._free_at, time.perf_counter())

    def _is_done(self) -> bool:
        return time.perf_counter() >= self._done_at[0]

    def _collect(self) -> StepResult:
        plan, masks = self._plans.popleft()
        time.sleep(max(0.0, self._done_at.popleft() - time.perf_counter()))
        rows = [
            row
            for launch in plan.launches
            for row, samples in zip(
                launch.req_indices, launch.samples or [True] * len(launch.req_indices), strict=True
            )
            if samples or launch.phase == DECODE
        ]
        return StepResult(plan.step, [self._draw(masks.get(row)) for row in rows])

    def _draw(self, mask: memoryview | None) -> int:
        """A random allowed token, chosen cheaply: on a real device it takes no host time."""
        if mask is None:
            return 0
        words = np.frombuffer(mask, np.uint8)
        byte_index = int(self._random.choice(np.flatnonzero(words)))
        return byte_index * 8 + _lowest_bit(int(words[byte_index]))


def _lowest_bit(byte: int) -> int:
    return (byte & -byte).bit_length() - 1


def _by_row(rows: list[int], masks: memoryview) -> dict[int, memoryview]:
    size = masks.nbytes // max(len(rows), 1)
    return {row: masks[i * size : (i + 1) * size] for i, row in enumerate(rows)}


def measure(grammar: Grammar, num_rows: int, step_s: float, depth: int, num_steps: int) -> float:
    """Milliseconds per step, with all requests decoding under a grammar."""
    vocabulary = grammar.vocabulary
    schedule = SchedulerConfig(
        max_num_seqs=num_rows, max_num_batched_tokens=8192, max_inflight_steps=depth
    )
    limits = BucketLimits(
        BLOCK_SIZE, MAX_MODEL_LEN, num_rows, 8192, schedule.prefill_batch(), NUM_BLOCKS, False
    )
    table = BucketTable.make(BucketConfig(strategy="exact"), limits)
    facts = (NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, vocabulary.vocab_size)
    ready = WorkerReady(
        *facts, tuple(vocabulary.eos_ids), [], "clock", "none", 0, 0, 0, 0, 0.0, 0.0, limits
    )
    config = EngineConfig(model="none", scheduler=schedule)
    executor: Any = ClockExecutor(step_s)
    core = build_core(config, executor, ready, table, time.perf_counter)
    params = SamplingParams(max_tokens=MAX_MODEL_LEN, structured_outputs=FORM)
    for key in range(num_rows):
        core.add_request(AddRequest(key, PROMPT, params), [], grammar)
    while core.stats().steps < WARM_STEPS:
        core.step()
    start = time.perf_counter()
    while core.stats().steps < WARM_STEPS + num_steps:
        core.step()
    assert core.num_requests == num_rows, f"{core.num_requests} of {num_rows} rows are left"
    return (time.perf_counter() - start) / num_steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="a checkpoint folder, for its tokenizer")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--device-ms", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    model_config = read_model_config(arguments.folder)
    eos_ids = frozenset(model_config.eos_token_ids)
    grammar = Grammar(FORM, Vocabulary(arguments.folder, model_config.vocab_size, eos_ids))
    print(f"Vocabulary {model_config.vocab_size}, {arguments.device_ms} ms per step on the device")
    print("| guided requests | ms per step without overlap | with overlap |")
    print("| ---: | ---: | ---: |")
    for num_rows in arguments.rows:
        apart, ahead = (
            measure(grammar, num_rows, arguments.device_ms / 1e3, depth, arguments.steps)
            for depth in (1, 2)
        )
        print(f"| {num_rows} | {apart:.1f} | {ahead:.1f} |", flush=True)


if __name__ == "__main__":
    main()
