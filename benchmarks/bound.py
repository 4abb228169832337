"""Upper bound of a machine's speed with a model, from its memory bandwidth (reading weights) and
its matrix-product rate. Attention, KV cache and all other work count as free."""

import json
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.products import reading_rate
from hpu.backends.cpu import CpuBackend
from hpu.native.library import PackedLinear, kernel_folder, open_library

ROUNDS = 7
ROWS, INPUTS, OUTPUTS = 1024, 2048, 8192
BYTES_PER_WEIGHT = 2


@dataclass(frozen=True)
class Rates:
    """A machine's rates: bytes read per second, and bfloat16 multiplications per second."""

    reads: float
    multiplies: float


@dataclass(frozen=True)
class Weights:
    """Numbers of weights of a checkpoint, without norms and embedding."""

    body: int
    """Weights outside the experts and the head."""
    experts: int
    """Weights of all routed experts."""
    head: int
    num_experts: int = 1
    top_k: int = 1

    @property
    def used(self) -> float:
        """Weights in the products of a token, without the head."""
        return self.body + self.experts * self.top_k / self.num_experts

    def read(self, num_tokens: int) -> float:
        """Number of weights that a launch of `num_tokens` reads if every token chooses its experts
        at random."""
        unused = (1 - self.top_k / self.num_experts) ** num_tokens if self.experts else 0.0
        return self.body + self.head + self.experts * (1 - unused)


def machine_rates() -> Rates:
    """Rates measured with all cores: the faster of this project's and PyTorch's matrix product, and
    the faster of two ways to read memory (a sum, and a product of a single row)."""
    CpuBackend()  # Sets the number of threads as in the server
    with torch.inference_mode():
        x, weight = torch.randn(ROWS, INPUTS).bfloat16(), torch.randn(OUTPUTS, INPUTS).bfloat16()
        torchs = _seconds(lambda: torch.nn.functional.linear(x, weight))
        library = open_library(kernel_folder(None), torch.get_num_threads())
        reads, fastest = reading_rate(ROUNDS) * 1e9, torchs
        if library is not None:
            packed = PackedLinear(library, weight, None)
            fastest = min(torchs, _seconds(lambda: packed(x)))
            many = [PackedLinear(library, weight, None) for _ in range(4)]
            one_row = _seconds(lambda: [layer(x[:1]) for layer in many])
            reads = max(reads, len(many) * BYTES_PER_WEIGHT * weight.numel() / one_row)
    return Rates(reads, ROWS * weight.numel() / fastest)


def _seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def read_weights(folder: Path) -> Weights:
    """The weights of a Hugging Face folder with a single safetensors file."""
    config = json.loads((folder / "config.json").read_text())
    with (folder / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    matrices = {name: prod(shape) for name, shape in shapes.items() if len(shape) > 1}
    embedding = matrices.pop("model.embed_tokens.weight")
    head = matrices.pop("lm_head.weight", embedding)
    experts = sum(count for name, count in matrices.items() if ".experts." in name)
    return Weights(
        sum(matrices.values()) - experts,
        experts,
        head,
        config.get("num_experts", 1),
        config.get("num_experts_per_tok", 1),
    )


def least_seconds(
    weights: Weights, rates: Rates, *, prompt: int, output: int, streams: int, requests: int
) -> float:
    """Lower bound in seconds for `requests` requests with `streams` at a time: the prompts'
    products, one row of logits per request, then a decode of all streams for each further token."""
    prompts = requests * (prompt * weights.used + weights.head) / rates.multiplies
    products = streams * (weights.used + weights.head) / rates.multiplies
    decode = max(BYTES_PER_WEIGHT * weights.read(streams) / rates.reads, products)
    return prompts + requests / streams * (output - 1) * decode


def least_first_token_ms(
    weights: Weights, rates: Rates, *, prompt: int, requests: int
) -> tuple[float, float]:
    """Lower bounds of the median and maximum time to first token of `requests` prompts that arrive
    at once and are processed in sequence."""
    each = (prompt * weights.used + weights.head) / rates.multiplies * 1e3
    return each * (requests + 1) / 2, each * requests
