"""LoRA adapters with random weights in PEFT folders, and their merge into a checkpoint."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LINEAR = (*ATTENTION, *MLP)
PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    base: Path,
    *,
    targets: Sequence[str] = LINEAR,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    size: float = 0.3,
    **config: Any,
) -> Path:
    """Write an adapter for the checkpoint `base`, for each weight whose module name ends with an
    entry of `targets`. Its products are about as large as the base model's."""
    generator = torch.Generator().manual_seed(seed)
    ranks: dict[str, int] = config.get("rank_pattern", {})
    tensors: dict[str, Tensor] = {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module == name or not f".{module}".endswith(tuple(f".{target}" for target in targets)):
            continue
        own = next((n for key, n in ranks.items() if re.match(rf"(.*\.)?({key})$", module)), rank)
        rows, columns = weight.shape
        a = torch.randn((own, columns), generator=generator) * size / columns**0.5
        b = torch.randn((rows, own), generator=generator)
        is_table = module.endswith("embed_tokens")
        if is_table:
            a = torch.randn((own, rows), generator=generator) * size
            b = torch.randn((columns, own), generator=generator)
        names = (
            ("lora_embedding_A", "lora_embedding_B")
            if is_table
            else ("lora_A.weight", "lora_B.weight")
        )
        for key, tensor in zip(names, (a, b), strict=True):
            tensors[f"{PREFIX}{module}.{key}"] = tensor.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
        "inference_mode": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def merge(folder: Path, base: Path, adapter: Path) -> Path:
    """Write the checkpoint `base` with `adapter` merged into its weights: W + scale * B A."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(base / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        module, _, kind = name.removeprefix(PREFIX).rpartition(".lora_")
        if kind not in ("A.weight", "embedding_A"):
            continue
        b = tensors[name.replace("_A", "_B")]
        rank = len(a)
        alpha = _of(config.get("alpha_pattern", {}), module, config["lora_alpha"])
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        delta = scale * (b @ a)
        if kind == "embedding_A":
            delta = delta.t()
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight.float() + delta).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _of(pattern: dict[str, Any], module: str, default: Any) -> Any:
    found = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)
