"""This rank's part of an adapter's weights, in the row and column order of the base layers."""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.checkpoint.safetensors_files import StoredTensor
from config.checkpoint.weight_maps.base import WeightSpec
from config.checkpoint.weight_maps.shard import Shard, ShardRank, shard_of
from config.lora.adapter import AdapterModule, LoadedAdapter
from config.params.lora import EMBEDDING
from hpu.model_loader.loader import DTYPES, fill_parameter

_SUFFIXES = (".weight", "_weight")


class LowRank(NamedTuple):
    """The two matrices of an output of a layer, on the host: out += (x a^T) b^T."""

    layer: str
    """Path of the layer in the model; for experts, with suffix w13 or w2."""
    output: int
    """Index of the layer's output."""
    expert: int | None
    """Index of the expert on this rank; None without experts."""
    a: Tensor
    """(rank, in); for an embedding (rank, tokens), with all tokens."""
    b: Tensor
    """(out, rank), multiplied by the adapter's scale."""


def rank_weights(loaded: LoadedAdapter, at: ShardRank, dtype: torch.dtype) -> Iterator[LowRank]:
    """The weights in `dtype` that the rank `at` needs."""
    # Modules that share matrices are adjacent.
    for (stored_a, stored_b), modules in groupby(
        loaded.adapter.modules, key=lambda module: (module.a, module.b)
    ):
        a, b = (_tensor(loaded.data, stored) for stored in (stored_a, stored_b))
        for module in modules:
            yield from _parts(module, *_own(module, a, b), at, dtype)


def _tensor(data: NDArray[np.uint8], stored: StoredTensor) -> Tensor:
    """Copy a stored tensor: its bytes may be unaligned in the file."""
    tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    target = tensor.view(-1).view(torch.uint8).numpy()
    target[:] = data[stored.offset : stored.offset + stored.num_bytes]
    return tensor


def _own(module: AdapterModule, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    part = module.part
    if part is None:
        return a, b
    rows = b.narrow(0, part.first_row, module.base.out_features)
    first = part.expert * module.rank
    if part.is_grouped:
        columns = rows.narrow(1, first, module.rank)
    else:
        columns = rows[:, part.expert :: part.num_experts]
    return a.narrow(0, first, module.rank), columns


def _parts(
    module: AdapterModule, a: Tensor, b: Tensor, at: ShardRank, dtype: torch.dtype
) -> Iterator[LowRank]:
    spec = module.base.spec
    layer = spec.parameter
    for suffix in _SUFFIXES:
        layer = layer.removesuffix(suffix)
    b = (b.float() * module.scale).to(dtype)
    if module.base.kind == EMBEDDING:
        # Each rank looks up all tokens, which avoids a collective.
        yield LowRank(layer, 0, None, a.to(dtype), b)
        return
    shard = shard_of(_rows_spec(spec, module), at)
    if shard is None:
        return
    local = shard.spec
    own = _select(b, shard)
    columns = shard_of(_columns_spec(spec, module), at)
    assert columns is not None
    a = _select(a, columns).to(dtype)
    plain = local._replace(expert=None, total_experts=None)
    sizes = local.output_sizes or (_num_rows(spec, module, at),)
    rows = torch.zeros((sum(sizes), b.shape[1]), dtype=dtype)
    fill_parameter(rows, plain, own)
    outputs = local.outputs or (0,)
    for output, part in enumerate(rows.split_with_sizes(sizes)):
        if output in outputs:
            yield LowRank(layer, output, local.expert, a, part.contiguous())


def _rows_spec(spec: WeightSpec, module: AdapterModule) -> WeightSpec:
    """Spec of `b`: the spec of the layer's weight with `rank` inputs."""
    divided = spec.shard_dim if spec.shard_dim == 0 else None
    shape = (module.base.out_features, module.rank)
    return spec.plain()._replace(shape=shape, shard_dim=divided)


def _columns_spec(spec: WeightSpec, module: AdapterModule) -> WeightSpec:
    """Spec of `a`: the spec of a weight with the layer's inputs and `rank` outputs."""
    divided = spec.shard_dim if spec.shard_dim == 1 else None
    shape = (module.rank, module.base.in_features)
    return WeightSpec(
        spec.name,
        shape,
        spec.parameter,
        shard_dim=divided,
        expert=spec.expert,
        total_experts=spec.total_experts,
    )


def _num_rows(spec: WeightSpec, module: AdapterModule, at: ShardRank) -> int:
    """Output rows of the parameter on this rank. Vocabulary shards are rounded up."""
    count = module.base.out_features
    return -(-count // at.size) if spec.shard_dim == 0 else count


def _select(tensor: Tensor, shard: Shard) -> Tensor:
    if shard.intervals is None:
        return tensor
    parts = [tensor.narrow(shard.dim, begin, end - begin) for begin, end in shard.intervals]
    return torch.cat(parts, dim=shard.dim)
