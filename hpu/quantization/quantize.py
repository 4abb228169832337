"""A loaded model's products in few bits: rounded here, or as a GGUF file has them. Knows no kernels
and no devices."""

import logging
import time
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from config.engine import EngineConfig
from config.errors import ConfigError
from config.model.model_config import BLOCKS
from hpu.layers.linear import Linear, can_pack
from hpu.models.decoder import Decoder
from hpu.quantization.quantized import GROUP, Quantized, quantized, stacked

logger = logging.getLogger(__name__)


def quantize(model: Decoder, config: EngineConfig) -> int:
    """Give the products of `model`, which is filled and not yet packed, the bits that
    `config.quantization` asks for; the bytes of those weights. Raises ConfigError where the device
    cannot multiply them."""
    assert config.quantization is not None
    if not can_pack(model.dtype, model.device):
        raise ConfigError(
            f"quantization is {config.quantization}: it needs a CPU with bfloat16 instructions, "
            f"and this is {model.device.type}"
        )
    start = time.perf_counter()
    blocks = _Blocks(Path(config.model) / BLOCKS) if config.quantization == "gguf" else None
    wide = num_bytes = 0
    for linear, names in model.linears():
        weight: Quantized | None
        if blocks is not None:
            weight = blocks.weight(names)
        else:
            weight = _rounded(linear, 8 if linear is model.head else int(config.quantization[3:]))
        if weight is None:
            wide += 1
            continue
        num_bytes += weight.num_bytes
        linear.quantize(weight, keep_weight=model.shares_weight(linear))
    logger.info(
        "Quantization: %s, %.3f GiB, in %.1f s%s",
        config.quantization,
        num_bytes / 2**30,
        time.perf_counter() - start,
        f"; {wide} products stay in bfloat16, as the file has them in other bits" if wide else "",
    )
    return num_bytes


def _rounded(linear: Linear, bits: int) -> Quantized:
    assert linear.weight is not None
    return quantized(linear.weight.detach(), bits if linear.in_size % GROUP == 0 else 8)


class _Blocks:
    """What config/checkpoint/gguf_weights.py kept of a GGUF file."""

    def __init__(self, path: Path) -> None:
        with safe_open(str(path), framework="pt") as file:
            keys: list[str] = list(file.keys())
            self._blocks = {
                name: (kind, file.get_tensor(f"{name} {kind}"))
                for name, kind in (key.rsplit(" ", 1) for key in keys)
            }

    def weight(self, names: list[str]) -> Quantized | None:
        """The matrices one below the other; None if the file has them in kinds that are not kept,
        or in more than one."""
        if any(name not in self._blocks for name in names):
            return None
        return stacked([_unpacked(*self._blocks[name]) for name in names])


def _unpacked(kind: str, rows: Tensor) -> Quantized:
    """One tensor's blocks of 32 inputs, each a float16 scale, with Q4_1 a float16 least, and the
    values: with 4 bits the first 16 inputs are the low halves of the bytes, the others the high
    ones (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h)."""
    num_rows = rows.shape[0]
    head = 4 if kind == "Q4_1" else 2
    blocks = rows.view(num_rows, -1, head + (GROUP if kind == "Q8_0" else GROUP // 2))
    numbers = blocks[..., :head].contiguous().view(torch.float16)
    packed = blocks[..., head:]
    if kind == "Q8_0":
        values = packed.contiguous().view(torch.int8).view(num_rows, -1)
        return Quantized(8, values, numbers[..., 0].contiguous())
    values = torch.cat((packed & 15, packed >> 4), dim=-1).view(num_rows, -1)
    scales = numbers[..., 0].contiguous()
    # Q4_0 counts its values from -8.
    mins = numbers[..., 1].contiguous() if kind == "Q4_1" else scales * -8
    return Quantized(4, values, scales, mins)
