"""RankPool: processes as ranks of gloo groups, shared by many tests; and functions that run
there."""

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from child_processes import child_context
from paged_harness import PagedHarness, load_decoder
from torch import Tensor
from torch import distributed as dist

from config.engine import EngineConfig
from config.model.read_config import read_model_config
from hpu.backends.cpu import use_cpu_kernels
from hpu.distributed.process_groups import SINGLE, ProcessGroup, Ranks, join, leave
from hpu.layers.metadata import TextAttentionInputs
from hpu.model_loader import tensor_reader
from hpu.model_loader.loader import load_weights
from hpu.models.base import CausalLM, LoadableModel, ModelBuild
from hpu.models.registry import build_body, build_model, build_transformers_model
from hpu.quantization.kv_cache import plain_format
from hpu.quantization.registry import SCHEMES, process_weights

PROMPTS = {0: list(range(10, 31)), 1: [40, 41]}
NUM_TOKENS = 4
TIMEOUT_S = 100


class RankPool:
    """`size` processes. Use it in a `with` block."""

    def __init__(self, size: int, folder: Path, *, joins: bool = True) -> None:
        """`folder`: an empty folder for the rendezvous. `joins`: whether the processes join
        a process group; if False, the function that they run may join."""
        context = child_context()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            args = (theirs, Ranks(size, rank, f"file://{folder}/store", timeout_s=60))
            process = context.Process(target=_serve, args=(*args, joins), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(TIMEOUT_S)

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of `function` (a module's attribute) on the first `size` ranks, called with
        their group and `args`. Raises AssertionError with the traceback of a rank that fails."""
        pipes = self._pipes[:size]
        for pipe in pipes:
            pipe.send((size, function, args))
        results: dict[int, Any] = {}
        while len(results) < size:
            pending = [rank for rank in range(size) if rank not in results]
            ready = wait([pipes[rank] for rank in pending], TIMEOUT_S)
            assert ready, "the ranks do not answer"
            for rank in pending:
                if pipes[rank] in ready:
                    error, results[rank] = pipes[rank].recv()
                    assert error is None, error
        return [results[rank] for rank in range(size)]


def _serve(pipe: Connection, ranks: Ranks, joins: bool) -> None:
    torch.set_num_threads(1)
    if joins:
        groups = {ranks.world_size: join("gloo", ranks), 1: SINGLE}
    else:
        groups = {ranks.world_size: ProcessGroup(range(ranks.world_size), ranks.rank), 1: SINGLE}
    for size in range(2, ranks.world_size):
        # Every rank must create each group.
        group = dist.new_group(list(range(size))) if joins else None
        groups[size] = ProcessGroup(range(size), ranks.rank, group)
    while (task := pipe.recv()) is not None:
        size, function, args = task
        try:
            with torch.inference_mode():
                pipe.send((None, function(groups[size], *args)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
    if joins:
        leave()


class Generated(NamedTuple):
    """Results of greedy sampling from PROMPTS."""

    logits: Tensor
    """Logits (tokens, vocab) of prefill and decodes."""
    tokens: list[list[int]]
    """Tokens of each decode."""
    num_parameters: int
    num_bytes_read: int


def generate(
    group: ProcessGroup,
    folder: str,
    distributes_experts: bool = False,
    by_transformers: bool = False,
) -> Generated:
    """Run the checkpoint in `folder` in float32."""
    config, build = read_model_config(folder), build_model
    options: dict[str, Any] = {"group": group}
    if distributes_experts:
        options["expert_group"] = group
    if by_transformers:
        build = build_transformers_model  # type: ignore[assignment]
    own = ModelBuild(dtype=torch.float32, device=torch.device("cpu"), **options)
    model: LoadableModel = build(config, own)
    num_bytes = load_weights(model, folder, on_progress=lambda done, total: None, **options)
    process_weights(model, None)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Generated(*_greedy(model), num_parameters, num_bytes)


def _greedy(model: CausalLM) -> tuple[Tensor, list[list[int]]]:
    logits_of = model.logits

    def checked_logits(hidden: Tensor) -> Tensor:
        logits, best = logits_of(hidden), model.argmax(hidden)
        assert best is None or torch.equal(best, logits.argmax(-1))
        return logits

    model.logits = checked_logits  # type: ignore[method-assign]
    harness = PagedHarness(model)
    prefill = harness.prefill(PROMPTS)
    found, tokens = [*prefill.values()], []
    last = {row: int(logits[-1].argmax()) for row, logits in prefill.items()}
    for _ in range(NUM_TOKENS):
        tokens.append([*last.values()])
        decode = harness.decode(last)
        found += [logits.unsqueeze(0) for logits in decode.values()]
        last = {row: int(logits.argmax()) for row, logits in decode.items()}
    return torch.cat(found), [*tokens, [*last.values()]]


def prefill_quantized(group: ProcessGroup, folder: str, bits: str) -> Tensor:
    """bfloat16 logits of PROMPTS with weights of `bits` bits, computed by the CPU kernels."""
    model = build_model(
        read_model_config(folder),
        ModelBuild(
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            quantization=SCHEMES[bits](EngineConfig(folder)),
            group=group,
        ),
    )
    load_weights(model, folder, on_progress=lambda done, total: None, group=group)
    process_weights(model, bits)
    prepared = use_cpu_kernels(model, None)
    assert isinstance(prepared, CausalLM)
    return torch.cat([*PagedHarness(prepared).prefill(PROMPTS).values()]).float()


def decode_cached(group: ProcessGroup, folder: str, kv_cache_dtype: str) -> Tensor:
    """Logits of a decode after PROMPTS, in float32 with a KV cache in another dtype."""
    format = plain_format(kv_cache_dtype, torch.float32)
    assert format is not None
    model = load_decoder(Path(folder), group=group, format=format)
    harness = PagedHarness(model, cache_dtype=format.dtype)
    harness.prefill(PROMPTS)
    return torch.stack([*harness.decode(dict.fromkeys(PROMPTS, 5)).values()])


def encode(group: ProcessGroup, folder: str) -> Tensor:
    """Hidden states (tokens, hidden) of PROMPTS from the encoder in `folder`, in float32."""
    config, device = read_model_config(folder), torch.device("cpu")
    model = build_body(
        config,
        ModelBuild(
            dtype=torch.float32, device=device, max_model_len=config.max_position, group=group
        ),
    )
    load_weights(model, folder, on_progress=lambda done, total: None, group=group)
    found = []
    for tokens in PROMPTS.values():
        length = torch.tensor([len(tokens)])
        positions = torch.arange(len(tokens)).unsqueeze(0)
        inputs = TextAttentionInputs(positions, torch.zeros_like(positions), length)
        found.append(model(torch.tensor([tokens]), inputs).squeeze(0))
    return torch.cat(found)


def load_with_small_pieces(group: ProcessGroup, folder: str) -> tuple[int, int]:
    """(peak bytes that this process needs to load its shard of `folder`, bytes that it reads)."""
    usual, tensor_reader.PIECE_BYTES = tensor_reader.PIECE_BYTES, 2**20
    config = read_model_config(folder)
    _reset_peak()
    before = _memory_bytes("VmRSS")
    model = build_model(
        config, ModelBuild(dtype=torch.float32, device=torch.device("cpu"), group=group)
    )
    num_read = load_weights(model, folder, on_progress=lambda done, total: None, group=group)
    tensor_reader.PIECE_BYTES = usual
    return _memory_bytes("VmHWM") - before, num_read


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _memory_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024
