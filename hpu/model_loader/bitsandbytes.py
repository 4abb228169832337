"""Decoder of 4-bit bitsandbytes weights, equivalent to its functional.dequantize_4bit."""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from config.errors import CheckpointError
from config.model.quantization.base import Role
from config.model.quantization.bitsandbytes import BLOCK, NESTED_BLOCK


def decode_flat(parts: Mapping[Role, Tensor], sizes: tuple[int, ...], module: str) -> Tensor:
    """Whole weight (out, in) float32 of shape `sizes`, from tensors as stored. Raises
    CheckpointError for a shape or block size that differs from quant_state."""
    state = _state(parts["state"], module)
    expected = {"shape": list(sizes), "blocksize": BLOCK}
    scales = parts["blocks"]
    if "nested_blocks" in parts:
        expected["nested_blocksize"] = NESTED_BLOCK
        nested = parts["nested_blocks"].flatten().repeat_interleave(NESTED_BLOCK)
        codes = parts["nested_codes"].flatten()[scales.flatten().long()]
        offset = state.get("nested_offset")
        if not isinstance(offset, float):
            raise CheckpointError(f"quant_state of {module} has nested_offset {offset}, no number")
        scales = codes * nested[: len(codes)] + offset
    for name, value in expected.items():
        if state.get(name) != value:
            raise CheckpointError(
                f"quant_state of {module} has {name} {state.get(name)}, this model needs {value}"
            )
    pairs = parts["values"].flatten()
    # The first value is in the high half.
    values = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten()
    plain = parts["codes"].flatten()[values.long()].view(-1, BLOCK) * scales.view(-1, 1)
    if not plain.isfinite().all():
        raise CheckpointError(f"{module} has scales or codes that are NaN or infinite")
    return plain.view(sizes)


def _state(tensor: Tensor, module: str) -> dict[str, object]:
    try:
        found = json.loads(bytes(tensor.flatten().tolist()))
    except ValueError as error:
        raise CheckpointError(f"quant_state of {module} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"quant_state of {module} holds no JSON object")
    return found
