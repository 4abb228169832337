"""What LoRA adapters cost: tokens per second of the same streams without adapters, with one for
all, and with several mixed, by turns in one process.

    python benchmarks/adapters.py [--model FOLDER] [--streams 1 32] [--adapters 8] [--rank 16]

The adapters have random weights for all linear layers. Streams decode greedily; the best of the
rounds counts, since other work on the machine only takes time.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config.checkpoint.demo import NAMES
from config.checkpoint.resolve import resolve
from config.lora.base_modules import BaseModules
from config.model.read_config import read_model_config
from gaudiserve import LLM, LoRARequest, SamplingParams

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = "The history of the city begins with"


def write_adapter(folder: Path, model: str, rank: int, seed: int) -> Path:
    """An adapter for all linear layers that changes little."""
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


def rate(llm: LLM, num_streams: int, num_tokens: int, adapters: list[LoRARequest | None]) -> float:
    """Output tokens per second of streams that use `adapters` in turn."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    requests = [adapters[index % len(adapters)] for index in range(num_streams)]
    prompts = [f"{index} {PROMPT}" for index in range(num_streams)]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
    return num_streams * num_tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=NAMES[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    model = resolve(args.model, progress=False)
    with tempfile.TemporaryDirectory() as root:
        names = [f"adapter-{index}" for index in range(args.adapters)]
        folders = [
            write_adapter(Path(root, name), model, args.rank, seed)
            for seed, name in enumerate(names)
        ]
        with LLM(
            model,
            device="cpu",
            max_model_len=256,
            max_num_seqs=max(args.streams),
            enable_prefix_caching=False,
            enable_lora=True,
            max_loras=args.adapters,
            max_lora_rank=args.rank,
            lora_modules=[f"{n}={f}" for n, f in zip(names, folders, strict=True)],
        ) as llm:
            some: list[LoRARequest | None] = [LoRARequest(name, 1) for name in names]
            kinds: dict[str, list[LoRARequest | None]] = {
                "none": [None],
                "one": some[:1],
                f"{len(some)} mixed": some,
            }
            print(f"{'streams':>8} {'adapters':>10} {'tokens/s':>9} {'of none':>8}")
            for count in args.streams:
                best = dict.fromkeys(kinds, 0.0)
                for number in range(args.rounds + 1):
                    for kind, adapters in kinds.items():
                        found = rate(llm, count, args.tokens, adapters)
                        # The first round loads the adapters.
                        best[kind] = max(best[kind], found) if number else 0.0
                for kind, found in best.items():
                    share = found / best["none"]
                    print(f"{count:8} {kind:>10} {found:9.1f} {share:8.3f}", flush=True)


if __name__ == "__main__":
    main()
