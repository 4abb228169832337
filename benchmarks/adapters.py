"""Cost of LoRA adapters: tokens per second of the same streams without adapters, with a common
adapter, and with several adapters, in alternating rounds of a process.

    python benchmarks/adapters.py [--model FOLDER] [--streams 1 32] [--adapters 8] [--rank 16]
    python benchmarks/adapters.py --server 'NAME=COMMAND --port {port} --lora-modules {modules}'

The adapters have random weights for all linear layers. Streams decode greedily. The best
round is reported, since other work on the machine can only slow a round. With `--server`, OpenAI
servers are measured over HTTP, in sequence: each server is started by its command, in which
{modules} is replaced by the adapters as NAME=FOLDER. Run nothing else at the same time.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.asked import ask
from benchmarks.machine import machine
from benchmarks.started import started
from config.checkpoint.demo import NAMES
from config.checkpoint.resolve import resolve
from config.engine import EngineConfig
from config.lora.base_modules import BaseModules
from config.model.read_config import read_model_config
from gaudiserve import LLM, LoRARequest, SamplingParams

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = "The history of the city begins with"


def write_adapter(folder: Path, model: str, rank: int, seed: int) -> Path:
    """Write an adapter for all TARGETS, with random weights that hardly change the output."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in BaseModules(read_model_config(model)).modules.items():
        if name.rpartition(".")[2] in TARGETS:
            a = torch.randn((rank, module.in_features), generator=random) * 0.01
            b = torch.randn((module.out_features, rank), generator=random) * 0.01
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


Rate = Callable[[int, list[str | None]], float]
"""Function of (number of streams, adapters that the streams use in turn) that returns output tokens
per second."""


def offline(stack: ExitStack, args: argparse.Namespace, model: str, modules: list[str]) -> Rate:
    """Rate of an LLM in this process."""
    llm = stack.enter_context(
        LLM(
            model,
            device="cpu",
            max_model_len=256,
            max_num_seqs=max(args.streams),
            enable_prefix_caching=False,
            enable_lora=True,
            max_loras=args.adapters,
            max_lora_rank=args.rank,
            lora_modules=modules,
        )
    )
    num_tokens: int = args.tokens
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    def rate(num_streams: int, names: list[str | None]) -> float:
        adapters = [None if name is None else LoRARequest(name, 1) for name in names]
        requests = [adapters[index % len(adapters)] for index in range(num_streams)]
        prompts = [f"{index} {PROMPT}" for index in range(num_streams)]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        return num_streams * num_tokens / (time.perf_counter() - start)

    return rate


def of_server(stack: ExitStack, command: str, num_tokens: int, modules: list[str]) -> Rate:
    """Rate of the server that `command` starts."""
    server = stack.enter_context(started(command.replace("{modules}", " ".join(modules))))
    options = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}

    def rate(num_streams: int, names: list[str | None]) -> float:
        bodies: list[dict[str, object]] = [
            {
                "model": names[index % len(names)] or server.model,
                "prompt": f"{index} {PROMPT}",
                **options,
            }
            for index in range(num_streams)
        ]
        tokens, seconds = ask(server.port, "/v1/completions", bodies)
        return tokens / seconds

    return rate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=NAMES[0])
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    model = resolve(EngineConfig(args.model), progress=False)
    with tempfile.TemporaryDirectory() as root:
        names = [f"adapter-{index}" for index in range(args.adapters)]
        modules = [
            f"{name}={write_adapter(Path(root, name), model, args.rank, seed)}"
            for seed, name in enumerate(names)
        ]
        print(
            f"{machine()}\n{'server':>12} {'streams':>8} {'adapters':>10} {'tokens/s':>9} of none"
        )
        if not args.server:
            with ExitStack() as stack:
                measure("offline", offline(stack, args, model, modules), args, names)
        for server in args.server:
            name, command = server.split("=", 1)
            with ExitStack() as stack:
                rate = of_server(stack, command, args.tokens, modules)
                measure(name, rate, args, names)


def measure(server: str, rate: Rate, args: argparse.Namespace, names: list[str]) -> None:
    """Print the best rates of a server."""
    kinds: dict[str, list[str | None]] = {
        "none": [None],
        "one": [names[0]],
        f"{len(names)} mixed": [*names],
    }
    for count in args.streams:
        best = dict.fromkeys(kinds, 0.0)
        for number in range(args.rounds + 1):
            for kind, adapters in kinds.items():
                found = rate(count, adapters)
                # The first round loads the adapters.
                best[kind] = max(best[kind], found) if number else 0.0
        for kind, found in best.items():
            share = found / best["none"]
            print(f"{server:>12} {count:8} {kind:>10} {found:9.1f} {share:7.3f}", flush=True)


if __name__ == "__main__":
    main()
