"""Decode steps on a GPU compared with the bound of its memory bandwidth: random weights, by batch
size. Run: python benchmarks/cuda_decode.py  (--device cpu --shape tiny tests the script without a
GPU)

The bound is the time to read the weights and the keys and values of all requests once, at the
measured speed of a large copy within device memory. The step plans are constants and two steps are
in flight, as in a server; the scheduler is not part of the measurement.
"""

import argparse
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.model.model_config import ModelConfig, RopeConfig
from hpu.backends.base import Backend
from hpu.backends.cpu import CpuBackend
from hpu.backends.cuda import CudaBackend, missing_cuda
from hpu.launch_inputs import LaunchArrays
from hpu.models.base import ModelBuild
from hpu.models.decoder import Decoder
from hpu.models.registry import build_model
from hpu.protocol import DECODE, PREFILL, Launch, NewRequest, RequestSampling, StepPlan, StepResult
from hpu.runner.async_output import AsyncStepOutput
from hpu.runner.batch_state import BatchState
from hpu.runner.counters import Counters
from hpu.runner.graph_cache import CapturingGraphCache, GraphCache
from hpu.runner.input_buffers import DecodeLayout, InputBufferPool, InputLayout, PrefillLayout
from hpu.runner.kv_cache import KVCache, block_bytes
from hpu.runner.launch_results import copied_results
from hpu.runner.model_runner import ModelRunner, RunnerParts
from hpu.sampling.sampler import Sampler

GIB = 1024**3
WARM_STEPS = 8
COPIES = 10
MARGIN = 0.9
"""Share of the free memory that a batch may need; larger batches are skipped."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder without a checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = {
    "8b": Shape(128_256, 4096, 14_336, 32, 32, 8, 128),
    "1b": Shape(128_256, 2048, 8192, 16, 32, 8, 64),
    "tiny": Shape(320, 64, 128, 2, 4, 2, 16),
}
"""Two shapes like Llama 3, and a tiny shape to test a script."""


def open_device(name: str) -> Backend:
    """The back end `name`; exits with a message if the device does not exist."""
    if name == "cpu":
        return CpuBackend()
    missing = missing_cuda(
        torch.__version__, torch.version.cuda, has_device=torch.cuda.is_available()
    )
    if missing is not None:
        raise SystemExit(missing)
    return CudaBackend()


def device_name(name: str) -> str:
    return torch.cuda.get_device_name(0) if name == "cuda" else platform.processor() or "CPU"


def copy_bandwidth(backend: Backend, size: int) -> float:
    """Bytes/s, reads plus writes, of the fastest copy of `size` bytes."""
    source, target = backend.zeros((size,), torch.uint8), backend.zeros((size,), torch.uint8)
    best = float("inf")
    for _ in range(COPIES):
        start = backend.event()
        target.copy_(source)
        end = backend.event()
        end.wait()
        best = min(best, end.seconds_since(start))
    return 2 * size / best


def random_model(shape: Shape, backend: Backend, dtype: torch.dtype, length: int) -> Decoder:
    config = ModelConfig(
        "none",
        "LlamaForCausalLM",
        shape.vocab_size,
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_layers,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        length,
        rope=RopeConfig(500_000.0),
    )
    model = build_model(config, ModelBuild(dtype=dtype, device=backend.device))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)
    backend.prepare(model)
    return model


class Decoding:
    """`num_rows` decoding requests with `context` tokens each, and room for `num_steps` more."""

    def __init__(
        self,
        model: Decoder,
        backend: Backend,
        *,
        num_rows: int,
        context: int,
        num_steps: int,
        captures: bool,
        decodes: int = 1,
    ) -> None:
        """`decodes`: decodes in a step (--num-scheduler-steps)."""
        self._decodes = decodes
        num_steps *= decodes
        block_size = backend.default_block_size
        blocks_a_row = -(-(context + num_steps + 1) // block_size)
        num_blocks = num_rows * blocks_a_row
        vocab_size, length = model.config.vocab_size, model.config.max_position
        # Same choice as in hpu/worker/build.py.
        layouts: dict[int, InputLayout[LaunchArrays]] = {
            PREFILL: PrefillLayout(),
            DECODE: DecodeLayout(num_sets=2 * decodes),
        }
        input_buffers = InputBufferPool(backend, layouts)
        # Same choice as in hpu/worker/build.py.
        static_shapes = captures or backend.compiles
        sampler = Sampler(num_rows, vocab_size, backend, static_shapes=static_shapes)
        self._graphs: GraphCache = GraphCache(model.forward, backend, Counters())
        if captures:
            self._graphs = CapturingGraphCache(
                model.forward, backend, Counters(), budget_bytes=GIB * 1024
            )
        # The first decode captures the graph.
        self._graphs.on_demand = True
        self._runner = ModelRunner(
            RunnerParts(
                model=model,
                backend=backend,
                batch_state=BatchState(num_rows, length, block_size, pad_block=num_blocks),
                sampler=sampler,
                cache=KVCache(
                    model, backend, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype
                ),
                graphs=self._graphs,
                input_buffers=input_buffers,
                vocab_size=vocab_size,
                make_results=copied_results,
                pads=True,
            )
        )
        self._step = 0
        self._rows = list(range(num_rows))
        self._bucket = (num_rows, 1, num_blocks)
        if captures:
            input_buffers.prepare((DECODE, *self._bucket))
        self._admit(context, blocks_a_row, block_size)

    def _admit(self, context: int, blocks_a_row: int, block_size: int) -> None:
        """Add the requests with all tokens except the last as cached; their keys are zeros."""
        tokens = memoryview((np.arange(context, dtype="<u4") % 300).tobytes())
        for row in self._rows:
            blocks = list(range(row * blocks_a_row, (row + 1) * blocks_a_row))
            new = NewRequest(
                row, tokens, context, context - 1, blocks, RequestSampling(temperature=0.0)
            )
            cached = -(-(context - 1) // block_size)
            launch = Launch(PREFILL, (1, 1, cached), [row], [1], [True])
            self._collect(self._submit([launch], [new]))

    def _submit(self, launches: list[Launch], new_requests: list[NewRequest]) -> AsyncStepOutput:
        plan = StepPlan(self._step, launches, new_requests)
        plan.decode_steps = 1 if new_requests else self._decodes
        self._step += 1
        return self._runner.submit(plan)

    def _collect(self, output: AsyncStepOutput) -> StepResult:
        output.wait()
        return self._runner.collect(output)

    @property
    def is_captured(self) -> bool:
        """Whether the decode's bucket has a graph."""
        return self._graphs.has_graph((DECODE, *self._bucket))

    def steps(self, count: int) -> Iterator[StepResult]:
        """Run `count` steps with two steps in flight."""
        launches = [Launch(DECODE, self._bucket, self._rows)] * self._decodes
        waiting = self._submit(launches, [])
        for _ in range(count - 1):
            following = self._submit(launches, [])
            yield self._collect(waiting)
            waiting = following
        yield self._collect(waiting)


def measure(decoding: Decoding, num_steps: int) -> tuple[float, float]:
    """Seconds per step: wall time, and the median of the device time."""
    for _ in decoding.steps(WARM_STEPS):
        pass
    start = time.perf_counter()
    results = list(decoding.steps(num_steps))
    clock_s = (time.perf_counter() - start) / num_steps
    return clock_s, statistics.median(result.seconds[0] for result in results)


def weight_bytes(model: Decoder) -> int:
    """Bytes of the weights that a decode reads: all but the embedding table."""
    assert model.model.embed_tokens is not None
    table = model.model.embed_tokens.weight
    every = sum(p.numel() * p.element_size() for p in model.parameters())
    return every - table.numel() * table.element_size()


def one_line(
    model: Decoder, backend: Backend, options: argparse.Namespace, num_rows: int, speed: float
) -> str:
    """The table row of a batch size."""
    token_bytes = block_bytes(model, 1, model.dtype)
    total_steps = WARM_STEPS + options.steps
    reserved = num_rows * (options.context + total_steps + backend.default_block_size)
    needed, (free, _) = 2 * reserved * token_bytes, backend.memory()
    if needed > MARGIN * free:
        return f"| {num_rows} | needs {needed / GIB:.1f} GiB, {free / GIB:.1f} are free | | | | | |"
    found = []
    for captures in (False, True):
        decoding = Decoding(
            model,
            backend,
            num_rows=num_rows,
            context=options.context,
            num_steps=total_steps,
            captures=captures,
        )
        found.append(measure(decoding, options.steps))
        if decoding.is_captured != captures:
            raise SystemExit(f"a decode of batch {num_rows} was not captured: out of memory")
        del decoding
    (eager_s, _), (clock_s, device_s) = found
    weights_s = weight_bytes(model) / speed
    middle = options.context + WARM_STEPS + options.steps // 2
    bound_s = weights_s + num_rows * middle * token_bytes / speed
    numbers = (eager_s, clock_s, device_s, weights_s, bound_s)
    cells = " | ".join(f"{seconds * 1000:.2f}" for seconds in numbers)
    return f"| {num_rows} | {cells} | {device_s / bound_s:.2f} |"


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each request")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--copy-mib", type=int, default=1024, help="size of the measured copy")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    backend = open_device(options.device)
    with torch.inference_mode():
        speed = copy_bandwidth(backend, options.copy_mib * 1024**2)
        length = options.context + WARM_STEPS + options.steps + 2
        dtype = getattr(torch, options.dtype)
        model = random_model(SHAPES[options.shape], backend, dtype, length)
        print(
            f"Decode steps, {options.shape} shape in {options.dtype}, {options.context} tokens a "
            f"row, {options.steps} steps; {device_name(options.device)}, torch "
            f"{torch.__version__}, {datetime.date.today()}."
        )
        print(
            f"A step reads {weight_bytes(model) / GIB:.2f} GiB of weights; a copy moves "
            f"{speed / 1e9:.0f} GB/s. Milliseconds a step.\n"
        )
        print(
            "| rows | not captured | captured | captured, device | bound: weights | bound: with "
            "cache | device / bound |"
        )
        print("| ---: " * 7 + "|")
        for num_rows in options.rows:
            print(one_line(model, backend, options, num_rows, speed), flush=True)
    backend.close()


if __name__ == "__main__":
    main()
