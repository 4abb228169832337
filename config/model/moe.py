"""Reads the MoE fields of config.json into MoEConfig."""

from dataclasses import dataclass
from typing import NamedTuple

from config.errors import ConfigError
from config.model.json_fields import Fields, shown

MAX_EXPERTS = 4096
"""Maximum number of experts in a layer; published models have up to 512. The weight map has tensors
for each expert."""


class MoEFields(NamedTuple):
    """Names of a family's MoE fields in config.json; empty: the family has no such field."""

    num_experts: str
    top_k: str = "num_experts_per_tok"
    inner_size: str = "intermediate_size"
    dense_size: str = "intermediate_size"
    """Intermediate size of the dense layers."""
    shared_size: str = ""
    """Intermediate size of the shared expert."""
    num_shared: str = ""
    """Number of shared experts. They are merged into a single expert, whose size is `inner_size`
    times this number."""
    renormalize: str = ""
    num_groups: str = ""
    top_groups: str = ""
    scaling_factor: str = ""
    first_layer: str = ""
    last_layer: str = ""
    """Index of the last layer with experts; -1: the last layer."""
    layer_step: str = ""
    first_of_step: bool = False
    """Whether the first of every `layer_step` layers has experts, instead of the last."""
    dense_layers: str = ""
    expert_layers: str = ""
    """The layers with experts; if set, the layer fields above have no effect."""
    may_be_none: bool = False
    """Whether 0 experts means that all layers have a plain MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """MoE settings of a model."""

    fields: MoEFields
    num_experts: int
    top_k: int
    inner_size: int
    """Intermediate size of each routed expert."""
    shared_size: int = 0
    """Intermediate size of the shared expert; 0: no shared expert."""
    renormalize: bool = True
    """Whether the router weights of a token are normalized to sum 1, before `scaling_factor`."""
    num_groups: int = 1
    top_groups: int = 1
    """Number of expert groups, out of `num_groups`, that are selected for a token."""
    scaling_factor: float = 1.0
    first_layer: int = 0
    last_layer: int | None = None
    layer_step: int = 1
    """One layer of every `layer_step` layers has experts: the last, or the first if
    MoEFields.first_of_step is set."""
    dense_layers: frozenset[int] = frozenset()
    expert_layers: frozenset[int] | None = None
    """Indices of the layers with experts; if set, they replace the four fields above."""

    def has_experts(self, layer: int) -> bool:
        """Whether the layer with this index has experts instead of a plain MLP."""
        if self.expert_layers is not None:
            return layer in self.expert_layers
        return (
            self.first_layer <= layer
            and (self.last_layer is None or layer <= self.last_layer)
            and (layer if self.fields.first_of_step else layer + 1) % self.layer_step == 0
            and layer not in self.dense_layers
        )

    @property
    def shared_fields(self) -> str:
        """Names of the fields that determine `shared_size`."""
        names = self.fields
        return names.shared_size or f"{names.num_shared} * {names.inner_size}"


def moe_config(names: MoEFields, fields: Fields) -> MoEConfig:
    """MoE settings from config.json. Raises ConfigError."""
    num_experts = fields.count(names.num_experts, maximum=MAX_EXPERTS)
    top_k = fields.count(names.top_k)
    if top_k > num_experts:
        raise ConfigError(
            f"{names.top_k} in {fields.file} is {top_k}, it must be at most {names.num_experts}, "
            f"which is {num_experts}"
        )
    inner_size = fields.count(names.inner_size)
    num_groups, top_groups = _groups(fields, names, num_experts, top_k)
    last_layer = fields.integer(names.last_layer, -1, minimum=-1)
    return MoEConfig(
        fields=names,
        num_experts=num_experts,
        top_k=top_k,
        inner_size=inner_size,
        shared_size=_shared_size(fields, names, inner_size),
        # Most families that have this field default to false.
        renormalize=fields.get(names.renormalize, bool, not names.renormalize),
        num_groups=num_groups,
        top_groups=top_groups,
        scaling_factor=fields.number(names.scaling_factor, 1.0),
        first_layer=fields.integer(names.first_layer, 0),
        last_layer=None if last_layer == -1 else last_layer,
        layer_step=fields.count(names.layer_step, 1),
        dense_layers=_layers(fields, names.dense_layers) or frozenset(),
        expert_layers=_layers(fields, names.expert_layers),
    )


def _shared_size(fields: Fields, names: MoEFields, inner_size: int) -> int:
    if names.num_shared:
        return inner_size * fields.integer(names.num_shared, 0)
    return fields.integer(names.shared_size, 0)


def _groups(fields: Fields, names: MoEFields, num_experts: int, top_k: int) -> tuple[int, int]:
    num_groups = fields.count(names.num_groups, 1)
    top_groups = fields.count(names.top_groups, num_groups)
    if num_groups == 1:
        return 1, 1
    # A group's score may be the sum of its two best expert scores.
    if num_experts % num_groups or num_experts < 2 * num_groups:
        raise ConfigError(
            f"{names.num_groups} in {fields.file} is {num_groups}, it must divide "
            f"{names.num_experts}, {num_experts}, into groups of at least 2"
        )
    if top_groups > num_groups:
        raise ConfigError(
            f"{names.top_groups} in {fields.file} is {top_groups}, it must be at most "
            f"{names.num_groups}, which is {num_groups}"
        )
    available = num_experts // num_groups * top_groups
    if top_k > available:
        raise ConfigError(
            f"{names.top_k} in {fields.file} is {top_k}, it must be at most {available}, the "
            f"experts in {names.top_groups} of {names.num_groups} groups"
        )
    return num_groups, top_groups


def _layers(fields: Fields, name: str) -> frozenset[int] | None:
    layers = fields.get(name, list, None)
    if layers is None:
        return None
    if not all(type(layer) is int for layer in layers):
        raise ConfigError(
            f"{name} in {fields.file} is {shown(layers)}, it must be a list of layer indices"
        )
    return frozenset(layers)
