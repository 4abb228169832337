"""The key under which wrap_in_hpu_graph files a captured graph: shapes and layouts of tensors,
values of everything else. Knows no graphs."""

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def graph_key(value: Any, autocast: bool) -> object:
    """Tensors by (shape, view layout, autocast), never by dtype, values or device; containers
    item by item; anything else by its Python hash, so that an int that changes is a new key.
    TypeError for what cannot be hashed."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.storage_offset(), autocast
    if isinstance(value, dict):
        return tuple((key, graph_key(item, autocast)) for key, item in value.items())
    if isinstance(value, UserDict):
        return tuple(value.keys()), graph_key(tuple(value.values()), autocast)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return tuple(graph_key(item, autocast) for item in value)
    return hash(value), autocast


def outline(value: Any) -> object:
    """The key without the values that tend to change from step to step (numbers, objects): two
    keys of one outline differ by such a value only."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.storage_offset()
    if isinstance(value, (dict, UserDict)):
        return tuple((key, outline(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return tuple(outline(item) for item in value)
    if value is None or isinstance(value, (bool, str)):
        return value
    return type(value).__name__


def visible_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors that a captured graph takes as inputs, in the key's order; those inside other
    objects are invisible and baked in."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, UserDict)):
        for item in value.values():
            yield from visible_tensors(item)
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for item in value:
            yield from visible_tensors(item)
