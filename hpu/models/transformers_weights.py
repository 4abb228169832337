"""Weight map of a model that runs transformers' code, derived from its parameters."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from config.checkpoint.safetensors_files import Shapes
from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.checkpoint.weight_maps.text_part import OUTSIDE
from hpu.layers.embedding import ParallelLMHead
from hpu.layers.linear import LinearBase
from hpu.models.transformers_attention import UnsupportedModelCode

GATE_UP = "w13_weight"
"""Suffix of the parameter that holds gate and up of all experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersWeightMap(WeightMap):
    """Tensors of a transformers model, named by parameter path."""

    names: frozenset[str]
    """Names of all tensors."""
    base_prefix: str
    """Name prefix of the model without its head, such as `model.`."""
    conversions: tuple[Any, ...]
    """transformers' renamings of tensors in older checkpoints, in order."""
    ignored: tuple[re.Pattern[str], ...]
    """Patterns of names that a checkpoint may hold and the model does not need."""

    def map_name(self, name: str) -> str:
        name = self.text_name(name)
        if name.startswith(OUTSIDE):
            return name
        for conversion in self.conversions:
            name, _ = conversion.rename_source_key(name)
        for candidate in (self.base_prefix + name, name.removeprefix(self.base_prefix)):
            if name not in self.names and candidate in self.names:
                return candidate
        return name

    def ignores(self, name: str) -> bool:
        return name.startswith(OUTSIDE) or any(pattern.search(name) for pattern in self.ignored)


def weight_map_of(
    model: Any,
    shapes: Shapes,
    linears: Mapping[str, type[LinearBase]],
    renamed: Mapping[str, str],
    stored: Shapes,
    *,
    is_text_part: bool,
) -> TransformersWeightMap:
    """Weight map of `model`, a PreTrainedModel whose checkpoint tensors have `shapes`. `linears`:
    replacement class of the linear layer at each path. `renamed`: old -> new path of moved
    parameters. `stored`: tensors of the checkpoint, which may hold each expert separately; with
    `is_text_part` it also holds tensors of image or audio parts. Raises UnsupportedModelCode."""
    renamings, merges = _conversions(model)
    weight_map = TransformersWeightMap(
        (),
        names=frozenset(shapes),
        base_prefix=f"{model.base_model_prefix}.",
        conversions=tuple(renamings),
        ignored=tuple(_ignored(model, shapes)),
        is_text_part=is_text_part,
    )
    found = {weight_map.map_name(name) for name in stored}
    specs: list[WeightSpec] = []
    for spec in _specs(shapes, linears, renamed):
        parts = [part for merge in merges for part in merge.parts(spec)]
        specs += parts if any(part.name in found for part in parts) else [spec]
    return replace(weight_map, outer=tuple(specs), names=frozenset(spec.name for spec in specs))


def _specs(
    shapes: Shapes, linears: Mapping[str, type[LinearBase]], renamed: Mapping[str, str]
) -> Iterator[WeightSpec]:
    for name, shape in shapes.items():
        if name in renamed:
            yield _experts(name, shape, renamed[name])
            continue
        path, _, kind = name.rpartition(".")
        shard_dim = linears[path].shard_dim if path in linears else None
        if kind == "bias" and shard_dim == 1:
            shard_dim = None
        spec = WeightSpec(name, shape, name, shard_dim=shard_dim)
        yield spec._replace(rounds_up=linears.get(path) is ParallelLMHead)


def _experts(name: str, shape: tuple[int, ...], parameter: str) -> WeightSpec:
    num_experts, rows, _ = shape
    spec = WeightSpec(name, shape, parameter, num_experts=num_experts)
    if parameter.endswith(GATE_UP):
        return spec._replace(output_sizes=(rows // 2,) * 2, outputs=(0, 1), shard_dim=0)
    return spec._replace(shard_dim=1)


class _ExpertMerge(NamedTuple):
    """Tensors of single experts that form a stacked tensor."""

    sources: tuple[str, ...]
    """Name suffixes of the tensors, with `*` for the expert; the tensors of an expert are
    concatenated."""
    target: str
    """Name suffix of the stacked tensor."""

    def parts(self, spec: WeightSpec) -> Iterator[WeightSpec]:
        """Tensors that fill the stacked tensor `spec`; nothing if `spec` is a different tensor."""
        if not spec.name.endswith(self.target):
            return
        num_experts, rows, columns = spec.shape
        # A tensor with a single source has all rows.
        rows //= len(self.sources)
        for expert in range(num_experts):
            for output, source in enumerate(self.sources):
                name = spec.name.removesuffix(self.target) + source.replace("*", str(expert))
                yield spec._replace(
                    name=name,
                    shape=(rows, columns),
                    outputs=(output,) if spec.outputs else (),
                    expert=expert,
                    total_experts=num_experts,
                    num_experts=None,
                )


def _conversions(model: Any) -> tuple[list[Any], list[_ExpertMerge]]:
    """Conversions of the installed transformers on load: renamings, and stacking of experts. Raises
    UnsupportedModelCode for any other conversion of the model's tensors."""
    renamings: list[Any] = []
    merges = []
    names = [name for name, _ in model.named_parameters()]
    for conversion in get_model_conversion_mapping(model):
        if isinstance(conversion, WeightRenaming):
            renamings.append(conversion)
        if not isinstance(conversion, WeightConverter):
            continue
        kinds = [type(operation).__name__ for operation in conversion.operations]
        targets = conversion.target_patterns
        if kinds[:1] == ["MergeModulelist"] and kinds[1:] in ([], ["Concatenate"]):
            merges.append(_ExpertMerge(tuple(conversion.source_patterns), *targets))
        elif any(re.search(target, name) for target in targets for name in names):
            raise UnsupportedModelCode(f"converts tensors when it loads them ({', '.join(kinds)})")
    return renamings, merges


def _ignored(model: Any, shapes: Shapes) -> Iterator[re.Pattern[str]]:
    # Buffers that early releases wrote into checkpoints.
    yield re.compile(r"\.rotary_emb\.inv_freq$")
    for module in model.modules():
        # Only the body lists the key projections that layers with shared keys do not need.
        for pattern in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ():
            yield re.compile(pattern)
    # Tied tensors that the checkpoint stores twice.
    for name in model.all_tied_weights_keys:
        if name not in shapes:
            yield re.compile(f"^{re.escape(name)}$")
