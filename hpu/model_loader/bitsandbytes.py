"""Decoder of 4-bit bitsandbytes weights, and encoder to NF4 without double quantization."""

import json
import math
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from config.errors import CheckpointError
from config.json_text import parse_json
from config.model.quantization.base import Role
from config.model.quantization.bitsandbytes import BLOCK, NESTED_BLOCK, NF4
from hpu.model_loader.quantized_weights import nonzero

NF4_CODES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Numbers of the codes 0 to 15: the NF4 data type (Dettmers et al., QLoRA, arXiv 2305.14314,
appendix E)."""


def decode_flat(parts: Mapping[Role, Tensor], sizes: tuple[int, ...], module: str) -> Tensor:
    """Whole weight (out, in) float32 of shape `sizes`, from tensors as stored. Raises
    CheckpointError."""
    state = _state(parts["state"], module)
    expected = {"shape": list(sizes), "blocksize": BLOCK}
    scales = parts["blocks"]
    if "nested_blocks" in parts:
        expected["nested_blocksize"] = NESTED_BLOCK
        nested = parts["nested_blocks"].flatten().repeat_interleave(NESTED_BLOCK)
        codes = parts["nested_codes"].flatten()[scales.flatten().long()]
        offset = state.get("nested_offset")
        # JSON writers may write a whole float without a fraction.
        if isinstance(offset, bool) or not isinstance(offset, int | float):
            raise CheckpointError(
                f"quant_state of {module} has nested_offset {offset}, it must be a number"
            )
        scales = codes * nested[: len(codes)] + offset
    for name, value in expected.items():
        if state.get(name) != value:
            raise CheckpointError(
                f"quant_state of {module} has {name} {state.get(name)}, it must be {value}"
            )
    pairs = parts["values"].flatten()
    # The first value is in the high half.
    values = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten()
    codes, size = parts["codes"].flatten(), math.prod(sizes)
    plain = _blocks_of(codes[values[:size].int()]).mul_(scales.view(-1, 1)).flatten()[:size]
    if not plain.isfinite().all():
        raise CheckpointError(f"{module} has scales or codes that are NaN or infinite")
    return plain.view(sizes)


def encode_nf4(weight: Tensor) -> dict[Role, Tensor]:
    """The tensors that `decode_flat` reads, for a `weight` (out, in): NF4 codes of blocks of BLOCK
    numbers that are divided by the largest magnitude of the block."""
    blocks = _blocks_of(weight.float().flatten())
    scales = blocks.abs().amax(1)
    middles = [(low + high) / 2 for low, high in pairwise(NF4_CODES)]
    normal = blocks / nonzero(scales).unsqueeze(1)
    values = torch.bucketize(normal, torch.tensor(middles), out_int32=True).to(torch.uint8)
    values = functional.pad(values.flatten()[: weight.numel()], (0, weight.numel() % 2))
    state = {"quant_type": NF4, "blocksize": BLOCK, "shape": list(weight.shape)}
    return {
        "values": values[::2] << 4 | values[1::2],
        "blocks": scales,
        "codes": torch.tensor(NF4_CODES),
        "state": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _blocks_of(numbers: Tensor) -> Tensor:
    """The flat `numbers` as (blocks, BLOCK); the last block is padded with zeros."""
    return functional.pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK)


def _state(tensor: Tensor, module: str) -> dict[str, object]:
    try:
        found = parse_json(bytes(tensor.flatten().tolist()))
    except ValueError as error:
        raise CheckpointError(f"quant_state of {module} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"quant_state of {module} is not a JSON object")
    return found
