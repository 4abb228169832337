"""The quantized blocks of a GGUF file, as config/checkpoint/gguf_weights.py stores them."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from hpu.quantization.quantized_weight import GROUP_SIZE, QuantizedWeight, concatenate


class GgufBlocks:
    """The file beside the weights. A tensor is read when `weight` needs it."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        with safe_open(self._path, framework="pt") as file:
            keys: list[str] = list(file.keys())
        self._kinds = dict(key.rsplit(" ", 1) for key in keys)

    def weight(self, names: list[str]) -> QuantizedWeight | None:
        """The tensors called `names`, concatenated along the outputs; None if the file has them in
        types that are not stored, or in several."""
        if any(name not in self._kinds for name in names):
            return None
        with safe_open(self._path, framework="pt") as file:
            return concatenate(
                [
                    _unpack(self._kinds[name], file.get_tensor(f"{name} {self._kinds[name]}"))
                    for name in names
                ]
            )


def _unpack(kind: str, rows: Tensor) -> QuantizedWeight:
    """One tensor (out, bytes): blocks of 32 inputs, each a float16 scale, with Q4_1 a float16
    minimum, and the values; with 4 bits the low halves of the bytes are the first 16 inputs, the
    high halves the others (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h)."""
    num_rows = rows.shape[0]
    header = 4 if kind == "Q4_1" else 2
    blocks = rows.view(num_rows, -1, header + (GROUP_SIZE if kind == "Q8_0" else GROUP_SIZE // 2))
    tables = blocks[..., :header].contiguous().view(torch.float16)
    packed = blocks[..., header:]
    scales = tables[..., 0].contiguous()
    if kind == "Q8_0":
        return QuantizedWeight(8, packed.contiguous().view(torch.int8).view(num_rows, -1), scales)
    values = torch.cat((packed & 15, packed >> 4), dim=-1).view(num_rows, -1)
    # Q4_0 counts its values from -8.
    mins = tables[..., 1].contiguous() if kind == "Q4_1" else scales * -8
    return QuantizedWeight(4, values, scales, mins)
