"""Conversion of the weights of a GGUF file to one safetensors file, as a stream."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from config.checkpoint.gguf_metadata import GgufFile, GgufTensor
from config.checkpoint.safetensors_files import Shapes
from config.errors import ConfigError
from config.model.json_fields import shown
from config.progress import Bar, Report, unreported

DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
BLOCK_TYPES = (
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q8_0,
)
"""Types with kernels here: blocks of 32 inputs with a scale, and in Q4_1 a minimum."""
_PIECE_BYTES = 64 * 2**20
"""Float32 bytes that are dequantized at a time."""

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Settings that are stored as tensors; config/checkpoint/gguf_config.py reads them.
_SETTINGS = re.compile(r"(^|\.)(rope_freqs|rope_factors_(long|short)|attn_rot_embd)\.weight$")
_LAYER_NAME = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")
_PERMUTED = ("llama", "mistral", "granite")


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    tensor: GgufTensor
    heads: int
    """Number of heads whose rows are interleaved for rope; 0: not interleaved."""
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        # GGUF lists the innermost dimension first.
        return self.tensor.shape[::-1]

    @property
    def num_bytes(self) -> int:
        return self.tensor.n_elements * DTYPES[self.dtype][1]


def checkpoint_name(architecture: str, name: str) -> str:
    """The Hugging Face name of tensor `name`. KeyError if there is none."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    match = _LAYER_NAME.match(name)
    if match is None:
        raise KeyError(name)
    layer, part, kind = match.groups()
    if architecture == "phi3" and part == "ffn_up":
        return f"model.layers.{layer}.mlp.gate_up_proj.{kind}"
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}"


def stored_shapes(file: GgufFile) -> Shapes:
    """Hugging Face name -> shape of the weights of `file`. ConfigError like write_safetensors."""
    return {entry.name: entry.shape for entry in _entries(file, "bfloat16")}


def write_safetensors(
    file: GgufFile, target: Path, dtype: str, progress: bool, report: Report = unreported
) -> None:
    """Write the weights of `file` to `target`, matrices in `dtype`, vectors (norms and biases, a
    few thousandths of all weights) in float32. Synced to disk on return.

    ConfigError for a tensor that the model does not have, or of an unsupported type.
    """
    # Wider dtypes first, so that every tensor is aligned to its width.
    entries = sorted(_entries(file, dtype), key=lambda entry: entry.dtype != "float32")
    look = {"desc": f"Converting {file.path.name}", "disable": not progress}
    with Bar("convert", report, total=sum(entry.num_bytes for entry in entries), **look) as bar:
        _write(
            target,
            [(e.name, DTYPES[e.dtype][0], e.shape, e.num_bytes) for e in entries],
            (piece for entry in entries for piece in _pieces(file, entry)),
            bar.update,
        )


def _write(
    target: Path,
    tensors: list[tuple[str, str, tuple[int, ...], int]],
    pieces: Iterable[npt.NDArray[Any]],
    written: Callable[[int], object],
) -> None:
    """Write a safetensors file of `tensors` (name, dtype, shape, bytes) with the bytes in `pieces`.
    Format: https://github.com/huggingface/safetensors#format"""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, num_bytes in tensors:
        start, end = end, end + num_bytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with target.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little"))
        out.write(encoded)
        for piece in pieces:
            out.write(piece.data)
            written(piece.nbytes)
        out.flush()
        os.fsync(out.fileno())


def _entries(file: GgufFile, dtype: str) -> list[_Entry]:
    entries = []
    for name, tensor in file.tensors.items():
        if _SETTINGS.search(name):
            continue
        try:
            target = checkpoint_name(file.architecture, name)
        except KeyError as error:
            raise ConfigError(
                f"{file.path} has a tensor {shown(name)}, which no {file.architecture} model has"
            ) from error
        vector, heads = len(tensor.shape) == 1, _heads(file, name)
        if heads and tensor.shape[-1] % (2 * heads):
            raise ConfigError(
                f"{file.path} has {tensor.shape[-1]} rows in {name}, which {heads} heads of two "
                "halves do not divide"
            )
        entries.append(_Entry(target, tensor, heads, "float32" if vector else dtype))
    return entries


def _heads(file: GgufFile, name: str) -> int:
    """Heads of q or k in files whose rows are interleaved, so that rope rotates neighbours."""
    if file.architecture not in _PERMUTED:
        return 0
    heads = file.count("attention.head_count")
    if ".attn_q." in name:
        return heads
    return file.count("attention.head_count_kv", heads) if ".attn_k." in name else 0


def _pieces(file: GgufFile, entry: _Entry) -> Iterator[npt.NDArray[Any]]:
    """The bytes of one tensor, a number of rows at a time."""
    data = _rows(entry)
    rows = len(data)
    row_bytes = 4 * int(np.prod(entry.shape[1:]))
    step = max(1, _PIECE_BYTES // row_bytes)
    for start in range(0, rows, step):
        try:
            # A damaged scale is found below.
            with np.errstate(over="ignore", invalid="ignore"):
                values = dequantize(data[start : start + step], entry.tensor.tensor_type)
        except NotImplementedError as error:
            kind = entry.tensor.tensor_type.name
            raise ConfigError(f"{file.path}: {entry.name} is stored as {kind}: {error}") from error
        numbers = np.ascontiguousarray(values, dtype=np.float32)
        _check_finite(numbers, f"{entry.name} in {file.path}")
        yield _as_stored(numbers, entry.dtype)


def _check_finite(numbers: npt.NDArray[np.float32], where: str) -> None:
    """Raise ConfigError for what a damaged scale gives. `where`: names the tensor and its file."""
    # The sum is a pass without a copy, and is finite for any weights of a model.
    with np.errstate(over="ignore", invalid="ignore"):
        is_finite = np.isfinite(numbers.sum(dtype=np.float64))
    if is_finite:
        return
    count = numbers.size - int(np.isfinite(numbers).sum())
    raise ConfigError(f"{where} has {count} of {numbers.size} weights that are NaN or infinite")


def _rows(entry: _Entry) -> npt.NDArray[Any]:
    """A tensor's stored rows in the order of a Hugging Face checkpoint."""
    rows = entry.shape[0]
    data: npt.NDArray[Any] = entry.tensor.data.reshape(rows, -1)
    if not entry.heads:
        return data
    # A head's rows alternate between its first and second half; put the halves one after the other.
    # Whole rows move, so this works for quantized rows too.
    order = np.arange(rows).reshape(entry.heads, rows // entry.heads // 2, 2)
    ordered: npt.NDArray[Any] = data[order.swapaxes(1, 2).reshape(-1)]
    return ordered


def write_blocks(file: GgufFile, target: Path) -> None:
    """Write the blocks of all matrices of BLOCK_TYPES to `target`: uint8 (rows, bytes per row),
    with name and type as the key, such as `lm_head.weight Q8_0`. Synced to disk on return."""
    matrices = [
        (entry, entry.tensor.data.reshape(entry.shape[0], -1))
        for entry in _entries(file, "bfloat16")
        if entry.tensor.tensor_type in BLOCK_TYPES and len(entry.shape) == 2
    ]
    _write(
        target,
        [
            (f"{e.name} {e.tensor.tensor_type.name}", "U8", raw.shape, raw.nbytes)
            for e, raw in matrices
        ],
        (np.ascontiguousarray(_rows(entry)) for entry, _ in matrices),
        lambda _: None,
    )


def _as_stored(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    return to_bfloat16(values)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of each value rounded to bfloat16, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    # Rounding up could carry the low bits of a NaN into its sign.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    bfloat16: npt.NDArray[np.uint16] = np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
    return bfloat16
