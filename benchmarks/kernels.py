"""Prefill and decode of the CPU's compiled kernels, compared with the machine's own bound and with
an earlier version of the kernels, in alternating rounds in one process.

    python benchmarks/kernels.py --model demo --before ../before/hpu/native --markdown kernels.md
    python benchmarks/kernels.py --context 4096 --kv-cache-dtype auto int8 fp8 --launch "decode 8"
    python benchmarks/kernels.py --quantization none int8 int4 stored4
    python benchmarks/kernels.py --threads 1 --before ../before/hpu/native --json kernels.json

Weights are random. The bound of a launch is the longer of two times: the time to read its weights
and its cached keys and values once, and the time to compute its products, at the rates that the
same threads reach when they do nothing else (benchmarks/rates.cpp). `--before` takes a folder with
decode.cpp, whose structures must equal this tree's. With one thread the times are the thread's
processor time, without the time of other processes. Without `--before`, several `--kv-cache-dtype`
or `--quantization` can be compared; `stored4` is the 4-bit format of AWQ and GPTQ checkpoints, in
groups of 64.
"""

import argparse
import ctypes
import datetime
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.checkpoints import COMMON, CONFIGS
from benchmarks.machine import machine
from config.model.kv_cache_dtype import AUTO, KV_CACHE_DTYPES
from config.model.model_config import ModelConfig
from config.model.read_config import read_model_config
from hpu.backends.cpu import CpuBackend, use_cpu_kernels
from hpu.layers.metadata import DecodeAttentionInputs, PrefillAttentionInputs
from hpu.models.base import CausalLM, ModelBuild
from hpu.models.registry import build_model
from hpu.native.library import (
    COMPILERS,
    FLAGS,
    Library,
    kernel_folder,
    open_library,
    openmp_runtime,
)
from hpu.native.pages import HugePages
from hpu.quantization.base import LinearMethod, LinearShards, QuantizationScheme
from hpu.quantization.kv_cache import KVCacheFormat, plain_format
from hpu.quantization.quantized_weight import QuantizedWeight
from hpu.quantization.registry import Int4, Int8, process_weights
from hpu.quantization.unquantized import UNQUANTIZED
from hpu.quantization.weight_only import WeightOnlyLinearMethod

RATES = Path(__file__).with_name("rates.cpp")
BLOCK_SIZE = 128
DIFFERENT_BLOCKS = 64
READ_BYTES = 256 << 20
LEAST_ROUNDS = 5

SHAPES: dict[str, dict[str, Any]] = {
    "demo": {
        **COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    **CONFIGS,
}
LAUNCHES = (
    "decode 1",
    "decode 2",
    "decode 4",
    "decode 8",
    "decode 16",
    "decode 32",
    "decode 64",
    "prompt 128",
    "prompt 1024",
    "prompts 8x128",
)
USUAL = ("decode 1", "decode 8", "decode 32", "prompt 128", "prompt 1024", "prompts 8x128")
STORED_GROUP_SIZE = 64


class StoredInt4(Int4):
    """4-bit weights with float32 scales and minima, like loaded AWQ and GPTQ checkpoints."""

    def linear_method(self, weight: LinearShards) -> LinearMethod:
        return UNQUANTIZED if weight.is_head else WeightOnlyLinearMethod(_stored)


def _stored(weight: Tensor) -> QuantizedWeight:
    out, size = weight.shape
    values = torch.randint(0, 16, (out, size), dtype=torch.uint8)
    scales = torch.full((out, size // STORED_GROUP_SIZE), 0.005)
    return QuantizedWeight(4, values, scales, -8 * scales)


def _filled(shape: Sequence[int], config: ModelConfig, format: KVCacheFormat | None) -> Tensor:
    """A cache of random rows; its first `DIFFERENT_BLOCKS` blocks repeat."""
    *outer, num_heads, _ = shape
    slots = prod(outer)
    size = (min(slots, DIFFERENT_BLOCKS * BLOCK_SIZE), num_heads, config.head_dim)
    rows = torch.randn(size).bfloat16()
    if format is not None:
        rows = format.codec(rows.dtype, torch.ones(1)).encode(rows)
    return rows.repeat(-(-slots // len(rows)), 1, 1)[:slots].view(tuple(shape))


QUANTIZATIONS: dict[str, Callable[[], QuantizationScheme] | None] = {
    "none": None,
    "int8": Int8,
    "int4": Int4,
    "stored4": StoredInt4,
}


@dataclass(frozen=True)
class Work:
    """Minimum bytes and operations of a launch."""

    bytes: float
    operations: float


class Launches:
    """A model with random weights and the kernels of a library, and its launches."""

    def __init__(
        self,
        config: ModelConfig,
        library: Library,
        context: int,
        streams: int,
        kv_cache_dtype: str = AUTO,
        quantization: str = "none",
    ) -> None:
        """`context`: cached tokens of each stream in a decode, including the new token; `streams`:
        maximum number of streams."""
        torch.manual_seed(0)
        scheme = QUANTIZATIONS[quantization]
        model = build_model(
            config,
            ModelBuild(
                dtype=torch.bfloat16,
                device=torch.device("cpu"),
                quantization=None if scheme is None else scheme(),
            ),
        )
        format = None
        if kv_cache_dtype != AUTO:
            format = plain_format(kv_cache_dtype, torch.bfloat16)
            assert format is not None, "the model has this data type"
            model.use_kv_cache_format(format)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(1)
        process_weights(model, None)
        self.model: CausalLM = use_cpu_kernels(model, library)  # type: ignore[assignment]
        self._context = context
        self._each = -(-context // BLOCK_SIZE)
        """Blocks of a stream."""
        num_blocks = max(64, streams * self._each)
        # Write all of the cache: reads of memory that was never written would cost nothing.
        # Blocks differ, so that streams differ and choose different experts.
        self._caches = [
            tuple(_filled(shape, config, format) for shape in shapes)
            for shapes in self.model.cache_shapes(num_blocks + 1, BLOCK_SIZE)
        ]
        self.model.bind_caches(self._caches, BLOCK_SIZE)

    def launch(self, name: str) -> Callable[[], Tensor]:
        """Function that runs a launch of `LAUNCHES`; its result is the tokens."""
        kind, size = name.split()
        if kind == "decode":
            return self._decode(int(size))
        batch, _, length = size.rpartition("x")
        return self._prefill(int(batch or 1), int(length))

    def _decode(self, batch: int) -> Callable[[], Tensor]:
        tokens = torch.arange(batch).unsqueeze(1) + 5
        positions = torch.full((batch, 1), self._context - 1)
        # Blocks in random order, not in the order of memory.
        count = batch * self._each
        blocks = torch.randperm(count, generator=torch.Generator().manual_seed(2))
        groups = torch.arange(batch).repeat_interleave(self._each)
        starts = torch.arange(self._each).repeat(batch) * BLOCK_SIZE
        usage = (self._context - starts).clamp_max(BLOCK_SIZE)
        last = blocks.view(batch, -1)[:, -1]
        slots = last * BLOCK_SIZE + (self._context - 1) % BLOCK_SIZE
        inputs = DecodeAttentionInputs(positions, slots, blocks, groups, starts, usage)

        def run() -> Tensor:
            hidden = self.model(tokens, inputs)[:, 0]
            return self._tokens(hidden)

        return run

    def _prefill(self, batch: int, length: int) -> Callable[[], Tensor]:
        tokens = torch.randint(
            5, 30000, (batch, length), generator=torch.Generator().manual_seed(1)
        )
        positions = torch.arange(length).expand(batch, length).contiguous()
        each = -(-length // BLOCK_SIZE) * BLOCK_SIZE
        slots = (torch.arange(batch).unsqueeze(1) * each + positions).view(-1)
        lens, context = torch.full((batch,), length), torch.zeros(batch).long()
        empty = torch.full((batch,), 64)
        inputs = PrefillAttentionInputs(positions, slots, lens, context, empty)

        def run() -> Tensor:
            hidden = self.model(tokens, inputs)[:, -1]
            return self._tokens(hidden)

        return run

    def _tokens(self, hidden: Tensor) -> Tensor:
        found = self.model.argmax(hidden)
        assert found is not None
        return found


def work_of(shape: dict[str, Any], name: str, context: int) -> Work:
    """Minimum bytes and operations of a launch in bfloat16."""
    kind, size = name.split()
    batch_text, _, length_text = size.rpartition("x")
    batch, length = (
        (int(length_text), 1) if kind == "decode" else (int(batch_text or 1), int(length_text))
    )
    rows, hidden = batch * length, shape["hidden_size"]
    head_dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
    query, kv = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    attention = hidden * (2 * query + 2 * kv)
    if experts := shape.get("num_experts"):
        each, top = 3 * hidden * shape["moe_intermediate_size"], shape["num_experts_per_tok"]
        # Expected number of experts that at least one row chooses.
        chosen = experts * (1 - (1 - top / experts) ** rows)
        read, computed = chosen * each + experts * hidden, top * each + experts * hidden
    else:
        read = computed = 3 * hidden * shape["intermediate_size"]
    head, layers = hidden * shape["vocab_size"], shape["num_hidden_layers"]
    seen = context if kind == "decode" else (length + 1) / 2
    cached = 2 * kv * batch * context if kind == "decode" else 0
    return Work(
        bytes=2 * (layers * (attention + read + cached) + head),
        operations=2 * (layers * rows * (attention + computed + 2 * query * seen) + batch * head),
    )


class Row(NamedTuple):
    """A launch, measured."""

    name: str
    work: Work
    seconds: list[list[float]]
    """Per state, a number per round."""
    agree: bool
    """Whether the tokens of all states are equal."""

    def ratio(self, state: int) -> float:
        """Median over the rounds of the first state's time, divided by that of `state`."""
        pairs = zip(self.seconds[0], self.seconds[state], strict=True)
        return median(before / now for before, now in pairs)


class Rates:
    """The machine's own rates, measured between the launches."""

    def __init__(self, folder: Path, threads: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._code = ctypes.CDLL(str(compiled(RATES, folder / "rates.so")))
        self._threads = ctypes.c_int64(threads)
        # Huge pages, like the memory of the weights.
        self._memory = HugePages().allocate((READ_BYTES,), torch.uint8).fill_(1)
        self.multiplied: list[float] = []
        self.read: list[float] = []

    def measure(self) -> None:
        count = 10**10
        start = self._clock()
        self._code.multiply_only(ctypes.c_int64(count), self._threads)
        self.multiplied.append(count / (self._clock() - start))
        address, size = ctypes.c_void_p(self._memory.data_ptr()), ctypes.c_int64(READ_BYTES)
        start = self._clock()
        self._code.read_only(address, size, self._threads)
        self.read.append(READ_BYTES / (self._clock() - start))

    def bound(self, work: Work) -> float:
        """Lower bound in seconds."""
        return max(work.bytes / median(self.read), work.operations / median(self.multiplied))


def compiled(source: Path, to: Path) -> Path:
    """Compile `source` to the library `to`. It is linked with torch's OpenMP runtime, because the
    waiting threads of a second runtime would compete."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    command = [compiler, *FLAGS, "-shared", str(source), "-o", str(to), *openmp_runtime()]
    subprocess.run(command, check=True, capture_output=True)
    return to


def config_of(shape: dict[str, Any], folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(shape))
    return read_model_config(str(folder))


def measure(
    states: Sequence[Launches],
    shape: dict[str, Any],
    names: Sequence[str],
    rates: Rates,
    budget: float,
    context: int,
    clock: Callable[[], float],
) -> list[Row]:
    """Rows of the table; each launch gets `budget` seconds, and at least LEAST_ROUNDS rounds."""
    found = []
    for name in names:
        runs = [state.launch(name) for state in states]
        answers = [run() for run in runs]
        agree = sum(torch.equal(answer, answers[0]) for answer in answers) == len(answers)
        seconds: list[list[float]] = [[] for _ in runs]
        end = time.perf_counter() + budget
        while time.perf_counter() < end or len(seconds[0]) < LEAST_ROUNDS:
            rates.measure()
            for run, times in zip(runs, seconds, strict=True):
                start = clock()
                run()
                times.append(clock() - start)
        found.append(Row(name, work_of(shape, name, context), seconds, agree))
        print(
            name, [f"{1e3 * median(t):.2f} ms" for t in seconds], len(seconds[0]), agree, flush=True
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="demo")
    parser.add_argument("--launch", nargs="+", choices=LAUNCHES, default=USUAL)
    parser.add_argument("--before", type=Path, help="folder of another decode.cpp")
    parser.add_argument("--context", type=int, default=128, help="cached tokens in a decode")
    parser.add_argument(
        "--kv-cache-dtype", nargs="+", choices=KV_CACHE_DTYPES, default=[AUTO], metavar="DTYPE"
    )
    parser.add_argument(
        "--quantization", nargs="+", choices=QUANTIZATIONS, default=["none"], metavar="NAME"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds per launch")
    parser.add_argument("--threads", type=int, help="default: as the server")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    CpuBackend()  # Sets the number of threads as in the server
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    threads = torch.get_num_threads()
    clock = time.thread_time if threads == 1 else time.perf_counter
    library = open_library(kernel_folder(None), threads)
    if library is None:
        raise SystemExit("the kernels are not available on this machine")
    shape, context = dict(SHAPES[arguments.model]), arguments.context
    shape["max_position_embeddings"] = max(shape["max_position_embeddings"], context)
    formats = list(itertools.product(arguments.kv_cache_dtype, arguments.quantization))
    if arguments.before and len(formats) > 1:
        parser.error(f"--before compares two states in one format, not in {len(formats)}")
    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        folder = Path(temporary)
        rates = Rates(folder, threads, clock)
        libraries = [library]
        if arguments.before:
            built = compiled(arguments.before / "decode.cpp", folder / "before.so")
            libraries.insert(0, Library(built, threads))
        config = config_of(shape, folder)
        batches = [int(name.split()[1]) for name in arguments.launch if "decode" in name]
        sizes = (context, max(batches, default=1))
        states = [
            Launches(config, library, *sizes, *names) for library in libraries for names in formats
        ]
        rows = measure(states, shape, arguments.launch, rates, arguments.seconds, context, clock)
    gigabytes, teraflops = median(rates.read) / 1e9, median(rates.multiplied) / 1e12
    names = [f"cache {cache}, weights {weights}" for cache, weights in formats]
    states_named = names if len(formats) > 1 else ["before", "now"][-len(states) :]
    columns = " | ".join(f"{item}, ms (range) | share of the bound" for item in states_named)
    title = (
        f"{datetime.date.today()}, {machine()}, {threads} threads. Shape `{arguments.model}`; "
        f"memory is read at {gigabytes:.1f} GB/s, products alone reach {teraflops:.2f} TFLOP/s. "
        f"Decodes over {context} cached tokens; bounds are those of bfloat16."
    )
    lines = [
        title,
        "",
        f"| launch | bound, ms | {columns} | ratio |",
        f"| --- | ---: |{' ---: | ---: |' * len(states)} ---: |",
    ]
    for row in rows:
        bound = rates.bound(row.work)
        cells = " | ".join(
            f"{1e3 * median(times):.2f} ({1e3 * min(times):.2f} to {1e3 * max(times):.2f}) "
            f"| {bound / median(times):.0%}"
            for times in row.seconds
        )
        ratio = row.ratio(len(states) - 1)
        lines.append(f"| {row.name} | {1e3 * bound:.2f} | {cells} | {ratio:.2f} |")
    table = "\n".join(lines) + "\n"
    print(table)
    if arguments.markdown:
        arguments.markdown.write_text(table)
    if arguments.json:
        data = {
            "title": title,
            "model": arguments.model,
            "states": states_named,
            "launches": [
                {
                    "launch": row.name,
                    "bound_s": rates.bound(row.work),
                    "seconds": row.seconds,
                    "ratio": row.ratio(len(states) - 1),
                    "same_tokens": row.agree,
                }
                for row in rows
            ],
        }
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
