"""Prefill and decode of the CPU's compiled kernels, compared with the machine's own bound and with
an earlier state of the kernels, by turns in one process.

    python benchmarks/kernels.py --model demo --before ../before/hpu/native --markdown kernels.md

Weights are random. The bound of a launch is the longer of two times: to read its weights and its
cached keys and values once, and to compute its products, at the rates that the same threads reach
when they do nothing else (benchmarks/rates.cpp). `--before` takes a folder with decode.cpp, whose
structures must be those of this tree.
"""

import argparse
import ctypes
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import machine
from config.model.model_config import ModelConfig
from config.model.read_config import read_model_config
from hpu.backends.cpu import CpuBackend, use_cpu_kernels
from hpu.layers.metadata import DecodeAttentionInputs, PrefillAttentionInputs
from hpu.models.base import CausalLM
from hpu.models.registry import build_model
from hpu.native.library import (
    COMPILERS,
    FLAGS,
    Library,
    kernel_folder,
    open_library,
    openmp_runtime,
)

RATES = Path(__file__).with_name("rates.cpp")
BLOCK_SIZE = 128
CONTEXT = 128
"""Cached tokens of each stream in a decode."""
READ_BYTES = 256 << 20

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "demo": {
        **_LLAMA,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "dense": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "moe": {
        **_LLAMA,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32000,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
LAUNCHES = ("decode 1", "decode 8", "decode 32", "prompt 128", "prompt 1024", "prompts 8x128")


@dataclass(frozen=True)
class Work:
    """What a launch reads and computes at least."""

    bytes: float
    operations: float


class Launches:
    """A model with random weights on one library, and its launches."""

    def __init__(self, config: ModelConfig, library: Library) -> None:
        torch.manual_seed(0)
        model = build_model(config, dtype=torch.bfloat16, device=torch.device("cpu"))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(1)
        self.model: CausalLM = use_cpu_kernels(model, library)  # type: ignore[assignment]
        num_blocks = 64
        self._caches = [
            tuple(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
            for shapes in self.model.cache_shapes(num_blocks + 1, BLOCK_SIZE)
        ]
        self.model.bind_caches(self._caches, BLOCK_SIZE)

    def launch(self, name: str) -> Callable[[], Tensor]:
        """The call of a launch, for `LAUNCHES`; its result is the tokens."""
        kind, size = name.split()
        if kind == "decode":
            return self._decode(int(size))
        batch, _, length = size.rpartition("x")
        return self._prefill(int(batch or 1), int(length))

    def _decode(self, batch: int) -> Callable[[], Tensor]:
        tokens = torch.arange(batch).unsqueeze(1) + 5
        positions = torch.full((batch, 1), CONTEXT - 1)
        slots = torch.arange(batch) * BLOCK_SIZE + CONTEXT - 1
        blocks = torch.arange(batch)
        starts, usage = torch.zeros(batch).long(), torch.full((batch,), CONTEXT)
        inputs = DecodeAttentionInputs(positions, slots, blocks, blocks, starts, usage)

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


def work_of(shape: dict[str, Any], name: str) -> Work:
    """Least bytes and operations of a launch in bfloat16."""
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
        # The expected number of experts that some row chooses.
        chosen = experts * (1 - (1 - top / experts) ** rows)
        read, computed = chosen * each + experts * hidden, top * each + experts * hidden
    else:
        read = computed = 3 * hidden * shape["intermediate_size"]
    head, layers = hidden * shape["vocab_size"], shape["num_hidden_layers"]
    seen = CONTEXT if kind == "decode" else (length + 1) / 2
    cached = 2 * kv * batch * CONTEXT if kind == "decode" else 0
    return Work(
        bytes=2 * (layers * (attention + read + cached) + head),
        operations=2 * (layers * rows * (attention + computed + 2 * query * seen) + batch * head),
    )


class Rates:
    """The machine's own rates, measured between the launches."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._code = ctypes.CDLL(str(compiled(RATES, folder / "rates.so")))
        self._code.multiply_only.restype = self._code.read_only.restype = ctypes.c_double
        self._threads = ctypes.c_int64(threads)
        self._memory = torch.ones(READ_BYTES, dtype=torch.uint8)
        self.multiplied: list[float] = []
        self.read: list[float] = []

    def measure(self) -> None:
        count = 10**10
        self.multiplied.append(
            count / float(self._code.multiply_only(ctypes.c_int64(count), self._threads))
        )
        address, size = ctypes.c_void_p(self._memory.data_ptr()), ctypes.c_int64(READ_BYTES)
        self.read.append(READ_BYTES / float(self._code.read_only(address, size, self._threads)))

    def bound(self, work: Work) -> float:
        """Seconds."""
        return max(work.bytes / median(self.read), work.operations / median(self.multiplied))


def compiled(source: Path, to: Path) -> Path:
    """Linked with torch's OpenMP runtime: the waiting threads of another would compete."""
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
) -> list[list[Any]]:
    """Rows of the table; each launch gets `budget` seconds."""
    found = []
    for name in names:
        runs = [state.launch(name) for state in states]
        answers = [run() for run in runs]
        agree = sum(torch.equal(one, answers[0]) for one in answers) == len(answers)
        seconds: list[list[float]] = [[] for _ in runs]
        end = time.perf_counter() + budget
        while time.perf_counter() < end or len(seconds[0]) < 3:
            rates.measure()
            for run, times in zip(runs, seconds, strict=True):
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
        found.append([name, work_of(shape, name), [median(times) for times in seconds], agree])
        print(
            name, [f"{1e3 * median(t):.2f} ms" for t in seconds], len(seconds[0]), agree, flush=True
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="demo")
    parser.add_argument("--launch", nargs="+", choices=LAUNCHES, default=LAUNCHES)
    parser.add_argument("--before", type=Path, help="folder of another decode.cpp")
    parser.add_argument("--seconds", type=float, default=6.0, help="per launch")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    CpuBackend()  # sets the number of threads as in the server
    threads = torch.get_num_threads()
    library = open_library(kernel_folder(None), threads)
    if library is None:
        raise SystemExit("the kernels are not available on this machine")
    shape = SHAPES[arguments.model]
    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        folder = Path(temporary)
        rates = Rates(folder, threads)
        libraries = [library]
        if arguments.before:
            built = compiled(arguments.before / "decode.cpp", folder / "before.so")
            libraries.insert(0, Library(built, threads))
        config = config_of(shape, folder)
        states = [Launches(config, one) for one in libraries]
        rows = measure(states, shape, arguments.launch, rates, arguments.seconds)
    gigabytes, teraflops = median(rates.read) / 1e9, median(rates.multiplied) / 1e12
    states_named = ["before", "now"][-len(states) :]
    columns = " | ".join(f"{one}, ms | share of the bound" for one in states_named)
    lines = [
        f"{datetime.date.today()}, {machine()}, {threads} threads. Shape `{arguments.model}`; "
        f"memory is read at {gigabytes:.1f} GB/s, products alone reach {teraflops:.2f} TFLOP/s.",
        "",
        f"| launch | bound, ms | {columns} |",
        f"| --- | ---: |{' ---: | ---: |' * len(states)}",
    ]
    for name, work, seconds, _ in rows:
        bound = rates.bound(work)
        cells = " | ".join(f"{1e3 * one:.2f} | {bound / one:.0%}" for one in seconds)
        lines.append(f"| {name} | {1e3 * bound:.2f} | {cells} |")
    table = "\n".join(lines) + "\n"
    print(table)
    if arguments.markdown:
        arguments.markdown.write_text(table)


if __name__ == "__main__":
    main()
