"""Square brackets on a device tensor, as views and index ops. Torch's own way asks for a device
guard that only a real driver brings. Knows no device rules."""

from typing import Any

import torch
from torch import Tensor


def read(tensor: Tensor, key: Any) -> Tensor:
    """`tensor[key]`; a 0-dimensional index tensor is read by the host, as torch does."""
    view, indices = _view(tensor, key)
    if not indices:
        return view if view is not tensor else torch.ops.aten.alias(tensor)
    out: Tensor = torch.ops.aten.index.Tensor(view, indices)
    return out


def write(tensor: Tensor, key: Any, value: Any) -> None:
    """`tensor[key] = value`."""
    view, indices = _view(tensor, key)
    if indices:
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
        elif value.device != tensor.device:
            value = value.to(tensor.device)
        torch.ops.aten.index_put_.default(view, indices, value)
    elif isinstance(value, Tensor):
        view.copy_(value.squeeze(0) if value.dim() > view.dim() else value)
    else:
        view.fill_(value)


def _view(tensor: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The basic parts of the key applied, and the index tensors left by dimension."""
    parts = list(key) if isinstance(key, tuple) else [key]
    taken = sum(_width(part) for part in parts)
    if taken > tensor.dim():
        raise IndexError(f"too many indices: {taken} for a tensor of {tensor.dim()} dimensions")
    dim = 0
    indices: dict[int, Tensor] = {}
    for place, part in enumerate(parts):
        if part is Ellipsis:
            dim = tensor.dim() - sum(map(_width, parts[place + 1 :]))
        elif part is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif isinstance(part, slice):
            if part != slice(None):
                bounds = part.start, part.stop, part.step or 1
                tensor = torch.ops.aten.slice.Tensor(tensor, dim, *bounds)
            dim += 1
        elif isinstance(part, (Tensor, list)) and not _is_number(part):
            index = part if isinstance(part, Tensor) else torch.tensor(part)
            indices[dim] = index.to(tensor.device)
            dim += index.dim() if index.dtype in (torch.bool, torch.uint8) else 1
        else:
            tensor = tensor.select(dim, int(part))
    if not indices:
        return tensor, []
    return tensor, [indices.get(place) for place in range(max(indices) + 1)]


def _width(part: Any) -> int:
    """Dimensions of the tensor that a part of the key uses up."""
    if part is None or part is Ellipsis:
        return 0
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 1


def _is_number(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dim() == 0
