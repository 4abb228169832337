"""Rate of loading weights, compared with the disk's own rate for the files.

    python benchmarks/load.py make FOLDER --layers 45      a checkpoint of 0.54 GB + 0.44 GB a layer
    python benchmarks/load.py measure FOLDER               the disk alone, and the loader
    python benchmarks/load.py model FOLDER --layers 17     the first layers on the CPU back end

`measure` loads into parameters that share their memory, so that any size fits; with --dtype float32
they are converted. "read" has as many concurrent reads as the loader. Files are dropped from the
page cache before each measurement, or stay in it with --cached.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.engine import EngineConfig
from config.model.read_config import read_model_config
from hpu.backends.select import select_backend
from hpu.model_loader.loader import load_weights
from hpu.model_loader.tensor_reader import NUM_THREADS, PIECE_BYTES
from hpu.models.base import LoadableModel, ModelBuild
from hpu.models.registry import build_model
from hpu.worker.load import load

HIDDEN, INNER, KV, VOCAB = 4096, 14336, 1024, 32768
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def make(folder: Path, num_layers: int) -> None:
    """Write a checkpoint of random weights, a shard at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_config(folder, num_layers)
    outer = {
        f"{name}.weight": _weights(VOCAB, HIDDEN) for name in ("model.embed_tokens", "lm_head")
    }
    norm = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save_file({**outer, "model.norm.weight": norm}, folder / "outer.safetensors")
    for index in range(num_layers):
        prefix = f"model.layers.{index}."
        layer = {f"{prefix}{name}.weight": _weights(*size) for name, size in LINEARS.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            layer[f"{prefix}{name}.weight"] = norm.clone()
        save_file(layer, folder / f"layer-{index:03d}.safetensors")
    os.sync()


def _write_config(folder: Path, num_layers: int) -> None:
    text = json.dumps({**CONFIG, "num_hidden_layers": num_layers})
    (folder / "config.json").write_text(text)


def _weights(rows: int, columns: int) -> Tensor:
    # Random bits are fast to make. Clearing the two highest exponent bits keeps the numbers small.
    numbers = torch.randint(0, 2**62, (rows * columns // 4,)) & 0x3FFF3FFF3FFF3FFF
    return numbers.view(torch.bfloat16).view(rows, columns)


def timed(folder: Path, name: str, work: Callable[[], object], *, cached: bool) -> None:
    """Run `work` and print the rate at which it processed the files of `folder`."""
    files = sorted(folder.glob("*.safetensors"))
    if not cached:
        for file in files:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in files)
    print(
        f"{name:<36}{size / 1e9:6.2f} GB{seconds:8.2f} s{size / seconds / 1e9:7.2f} GB/s",
        flush=True,
    )


def read(folder: Path, num_threads: int) -> None:
    """Read all files in pieces into buffers that are reused."""
    buffers = [bytearray(PIECE_BYTES) for _ in range(num_threads)]

    def read_every(first: int) -> None:
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb", buffering=0) as opened:
                for offset in range(
                    first * PIECE_BYTES, file.stat().st_size, num_threads * PIECE_BYTES
                ):
                    os.preadv(opened.fileno(), [buffers[first]], offset)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(read_every, range(num_threads)))


def shared_model(folder: Path, dtype: torch.dtype) -> LoadableModel:
    """The model of `folder`, in which parameters of the same shape share memory."""
    model_config = read_model_config(str(folder))
    model = build_model(
        model_config, ModelBuild(dtype=dtype, device=torch.device("meta"), max_model_len=8)
    )
    memory: dict[torch.Size, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.shape not in memory:
                zeros = torch.zeros(parameter.shape, dtype=dtype)
                memory[parameter.shape] = nn.Parameter(zeros, requires_grad=False)
            setattr(module, name, memory[parameter.shape])
    # By default, named_parameters omits tensors that it has seen under another name.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    model.named_parameters = parameters.items  # type: ignore[method-assign,assignment]
    return model


def measure(folder: Path, dtype: str, rounds: int, *, cached: bool) -> None:
    """Time the disk and the loader in alternating rounds."""
    model = shared_model(folder, getattr(torch, dtype))
    work = partial(load_weights, model, str(folder), on_progress=lambda done, total: None)
    for _ in range(rounds):
        timed(folder, "read", partial(read, folder, NUM_THREADS), cached=cached)
        timed(folder, f"load as {dtype}", work, cached=cached)


def load_model(folder: Path, num_layers: int, *, cached: bool) -> None:
    """Time the load of the first layers: the weights alone, then as a worker loads them, with
    packed products."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        part = Path(name)
        _write_config(part, num_layers)
        for file in ["outer", *(f"layer-{index:03d}" for index in range(num_layers))]:
            os.link(folder / f"{file}.safetensors", part / f"{file}.safetensors")
        model_config, cpu = read_model_config(str(part)), torch.device("cpu")

        def weights() -> None:
            model = build_model(
                model_config, ModelBuild(dtype=torch.bfloat16, device=cpu, max_model_len=8)
            )
            load_weights(model, str(part), on_progress=lambda done, total: None)

        timed(part, "read", lambda: read(part, NUM_THREADS), cached=cached)
        timed(part, "weights of a model", weights, cached=cached)
        config = EngineConfig(str(part), device="cpu", dtype="bfloat16")
        backend = select_backend(config)
        timed(
            part,
            "weights, packed",
            lambda: load(config, model_config, None, backend, lambda progress: None),
            cached=cached,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("make", "measure", "model"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=45)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cached", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    if args.command == "make":
        make(args.folder, args.layers)
    elif args.command == "measure":
        measure(args.folder, args.dtype, args.rounds, cached=args.cached)
    else:
        load_model(args.folder, args.layers, cached=args.cached)


if __name__ == "__main__":
    main()
