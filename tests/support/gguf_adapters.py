"""LoRA adapters as GGUF files, as llama.cpp's convert_lora_to_gguf.py stores them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from adapters import PREFIX
from gguf import GGMLQuantizationType, GGUFWriter, quants
from gguf_families import stored_tensors
from safetensors.numpy import load_file

Array = npt.NDArray[Any]
Metadata = Mapping[str, str | int | float | list[int] | list[str]]
Pairs = dict[str, tuple[Array, Array]]
"""(rank, in) and (out, rank) matrices by the name of the tensor that they change; the first matrix
of token_embd.weight is transposed, (in, rank)."""


def factors(product: Array, rank: int) -> tuple[Array, Array]:
    """Matrices with this product, or with each product of a stack, of rank at most `rank`."""
    u, s, v = np.linalg.svd(product.astype(np.float64), full_matrices=False)
    a = np.zeros((*product.shape[:-2], rank, product.shape[-1]), np.float32)
    b = np.zeros((*product.shape[:-1], rank), np.float32)
    size = min(rank, s.shape[-1])
    a[..., :size, :] = v[..., :size, :]
    b[..., :size] = u[..., :size] * s[..., None, :size]
    return a, b


def pairs_of(
    architecture: str, config: dict[str, Any], products: Mapping[str, Array], rank: int
) -> Pairs:
    """The matrices of a GGUF adapter; their products equal `products`, which has a checkpoint's
    names."""
    pairs = {}
    for name, product in stored_tensors(architecture, config, dict(products)):
        a, b = factors(product, rank)
        pairs[name] = (np.ascontiguousarray(a.T), b) if name == "token_embd.weight" else (a, b)
    return pairs


def write_pairs(
    path: Path,
    architecture: str,
    pairs: Mapping[str, tuple[Array | None, Array | None]],
    *,
    metadata: Metadata,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    further: Mapping[str, Array] | None = None,
) -> Path:
    """Write a file with the matrices `pairs` in type `kind`, and the tensors `further`."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add: dict[type, Any] = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    for name, pair in pairs.items():
        for end, matrix in zip(("lora_a", "lora_b"), pair, strict=True):
            if matrix is not None:
                data = quants.quantize(matrix, kind)
                writer.add_tensor(f"{name}.{end}", data, raw_dtype=kind)
    for name, values in (further or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


METADATA: Metadata = {
    "general.type": "adapter",
    "adapter.type": "lora",
    "general.name": "Adapter",
    "general.base_model.count": 1,
    "general.base_model.0.name": "Base",
    "general.base_model.0.repo_url": "https://huggingface.co/org/base",
    "general.tags": ["base_model:adapter:org/base", "lora", "transformers", "text-generation"],
    "adapter.lora.alpha": 8.0,
    "general.quantization_version": 2,
}
"""Fields that the script writes for a PEFT adapter."""


def as_gguf(path: Path, folder: Path, base: Path, architecture: str = "llama") -> Path:
    """Write the adapter in `folder` for the checkpoint `base` as a GGUF file."""
    config = json.loads((base / "config.json").read_text())
    settings = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    products = {}
    for name, a in tensors.items():
        module, _, end = name.removeprefix(PREFIX).rpartition(".lora_")
        if end == "A.weight":
            products[f"{module}.weight"] = tensors[name.replace("_A", "_B")] @ a
        elif end == "embedding_A":
            # The product of the two matrices is the transposed change of the embedding table.
            products[f"{module}.weight"] = tensors[name.replace("_A", "_B")] @ a
    pairs = pairs_of(architecture, config, products, settings["r"])
    metadata = {**METADATA, "adapter.lora.alpha": float(settings["lora_alpha"])}
    return write_pairs(path, architecture, pairs, metadata=metadata)
