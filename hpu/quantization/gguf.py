"""Reader of a GGUF file's quantized blocks, as stored by config/checkpoint/gguf_weights.py."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from config.checkpoint.weight_maps.shard import Shard
from hpu.quantization.quantized_weight import GROUP_SIZE, QuantizedWeight, concatenate

BLOCK_BYTES = {"Q8_0": 2 + GROUP_SIZE, "Q4_0": 2 + GROUP_SIZE // 2, "Q4_1": 4 + GROUP_SIZE // 2}
"""Bytes of a block of GROUP_SIZE inputs, by GGUF type."""


class GgufBlocks:
    """The block file next to the weights. A tensor is read when `weight` needs it."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        with safe_open(self._path, framework="pt") as file:
            keys: list[str] = list(file.keys())
        self._kinds = dict(key.rsplit(" ", 1) for key in keys)

    def weight(self, shards: list[Shard]) -> QuantizedWeight | None:
        """The `shards` of tensors, concatenated along the outputs; None if the file lacks a tensor,
        if their types cannot be concatenated, or if a shard begins or ends within a block."""
        if not all(shard.spec.name in self._kinds and _has_whole_blocks(shard) for shard in shards):
            return None
        with safe_open(self._path, framework="pt") as file:
            parts = []
            for shard in shards:
                kind = self._kinds[shard.spec.name]
                stored = file.get_slice(f"{shard.spec.name} {kind}")
                parts.append(_unpack(kind, _rows(shard, stored, BLOCK_BYTES[kind])))
        return concatenate(parts)


def _has_whole_blocks(shard: Shard) -> bool:
    if shard.intervals is None or shard.dim == 0:
        return True
    return all(end % GROUP_SIZE == 0 == begin % GROUP_SIZE for begin, end in shard.intervals)


def _rows(shard: Shard, stored: Any, block_bytes: int) -> Tensor:
    """(out, bytes) of this rank. `stored`: the safetensors slice of the whole tensor."""
    if shard.intervals is None:
        whole: Tensor = stored[:]
        return whole
    if shard.dim == 0:
        return torch.cat([stored[begin:end] for begin, end in shard.intervals])
    bounds = [
        (begin // GROUP_SIZE * block_bytes, end // GROUP_SIZE * block_bytes)
        for begin, end in shard.intervals
    ]
    return torch.cat([stored[:, begin:end] for begin, end in bounds], dim=1)


def _unpack(kind: str, rows: Tensor) -> QuantizedWeight:
    """Unpack a tensor (out, bytes): blocks of 32 inputs, each a float16 scale, a float16 minimum in
    Q4_1, and the values. 4-bit values: the low halves of the bytes are the first 16 inputs, the
    high halves are the last 16 (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h)."""
    num_rows = rows.shape[0]
    header = 4 if kind == "Q4_1" else 2
    blocks = rows.view(num_rows, -1, BLOCK_BYTES[kind])
    tables = blocks[..., :header].contiguous().view(torch.float16)
    packed = blocks[..., header:]
    scales = tables[..., 0].contiguous()
    if kind == "Q8_0":
        return QuantizedWeight(8, packed.contiguous().view(torch.int8).view(num_rows, -1), scales)
    values = torch.cat((packed & 15, packed >> 4), dim=-1).view(num_rows, -1)
    # Q4_0 values are offset by 8.
    mins = tables[..., 1].contiguous() if kind == "Q4_1" else scales * -8
    return QuantizedWeight(4, values, scales, mins)
