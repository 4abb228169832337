"""WeightMap and its entries, and the entries for linear layers."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from config.checkpoint.weight_maps.text_part import OUTSIDE, text_part_name
from config.model.decoder_spec import MXFP4_BLOCK
from config.model.quantization.base import PARAMETERS, WeightPart, WeightScheme


class WeightSpec(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    """Path of the parameter; several tensors may fill the same parameter."""
    fields: str = ""
    """The config.json fields that determine `shape`; empty: the shape is not checked before the
    model is built."""
    output_sizes: tuple[int, ...] = ()
    """Sizes of the outputs that the parameter concatenates along its first dimension."""
    outputs: tuple[int, ...] = ()
    """Indices in `output_sizes` of the outputs in this tensor."""
    num_heads: tuple[int, ...] = ()
    """Number of heads of each output, if outputs consist of heads. Heads are replicated if there
    are fewer heads than ranks."""
    shard_dim: int | None = None
    """Parameter dimension that tensor parallelism shards; None: replicated on every rank."""
    expert: int | None = None
    """Index of the expert, if the tensor holds a single expert of a parameter that stacks experts
    along its first dimension. The fields above then describe this expert."""
    total_experts: int | None = None
    """Number of experts that the parameter stacks, if the tensor holds a single expert."""
    num_experts: int | None = None
    """Number of experts in the tensor, if it stacks all experts along its first dimension like the
    parameter."""
    interleaved_size: int | None = None
    """Rows of each head after `interleaved_start`, if the tensor stores rotated pairs in adjacent
    rows. In the parameter, the first and second elements of the pairs are the two halves of the
    rotated rows."""
    rotated_size: int | None = None
    """Number of leading rows of each head that are rotated; None: all rows."""
    interleaved_outputs: int | None = None
    """Number of leading outputs of the tensor whose rows are interleaved; None: all outputs."""
    interleaved_dim: int = 0
    """The tensor dimension with the interleaved rows."""
    transposed: bool = False
    """Whether the parameter swaps the last two dimensions of the tensor."""
    row_groups: int | None = None
    """Number of row groups of a tensor with several outputs. Each group has a part of every output,
    such as the queries, key and value of a KV head. None: the outputs are concatenated."""
    row: int | None = None
    """Index of the tensor's row, if the tensor is a single row of an output."""
    offset: float = 0.0
    """Value added to the tensor, in float32."""
    normalized: bool = False
    """Whether each row is scaled to length 1."""
    interleaved_start: int = 0
    """Number of rows at the start of each head, before the `interleaved_size` rows, that are not
    reordered."""
    repeats: int | None = None
    """Number of repetitions of the tensor along a new first dimension; None: no repetition."""
    leading_rows: int | None = None
    """Number of leading rows of the tensor that are loaded; None: all."""
    mxfp4: Literal["", "blocks", "scales"] = ""
    """Part of an MXFP4 weight that this tensor stores; empty: no MXFP4 weight."""
    mxfp4_columns: tuple[int, int] | None = None
    """(begin, end) of the parameter's columns within the columns of the loaded blocks; None: all
    columns."""
    rounds_up: bool = False
    """Whether shard sizes are rounded up if the tensor does not divide evenly among the ranks. Rows
    beyond the end of the tensor are zero."""
    scheme: WeightScheme | None = None
    """Storage scheme of a quantized weight; None: not quantized. The fields above, except `name`,
    then describe the weight itself."""
    part: WeightPart | None = None
    """The part of the quantized weight that this tensor stores; None: not quantized."""
    is_kv_scale: bool = False
    """Whether the tensor is a KV-cache scale of a layer: a single number above 0."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        if self.part is None:
            return self.shape
        if self.num_experts is not None:
            return (self.num_experts, *self.part.shape(*self.shape[1:]))
        return self.part.shape(*self.shape)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor of `shape` fits this spec."""
        if self.is_kv_scale:
            return math.prod(shape) == 1
        expected = self.stored_shape
        return shape == expected if self.part is None else self.part.fits(shape, expected)

    @property
    def module(self) -> str:
        """Checkpoint name of the linear layer, or of the stacked experts, with this quantized
        weight."""
        assert self.part is not None
        if self.num_experts is not None:
            return self.name.removesuffix(self.part.suffix)
        return self.name.removesuffix(f".{self.part.suffix}")

    @property
    def is_stacked(self) -> bool:
        """Whether the tensor stacks a projection weight of all experts."""
        parameter = self.parameter.rpartition(".")[2]
        return self.num_experts is not None and parameter in ("w13_weight", "w2_weight")

    @property
    def quantized_parameter(self) -> str:
        """Path of the parameter that this tensor of a quantized weight fills if the weight stays
        quantized; empty if there is no such parameter."""
        assert self.part is not None
        name = PARAMETERS.get(self.part.role)
        return "" if name is None else self.parameter.removesuffix("weight") + name

    @property
    def mxfp4_parameter(self) -> str:
        """Path of the parameter that holds this part of an MXFP4 weight in packed form; empty for
        other weights."""
        return self.mxfp4 and self.parameter.removesuffix("weight") + self.mxfp4

    @property
    def is_scales(self) -> bool:
        """Whether the tensor holds the scales of an MXFP4 weight."""
        return self.mxfp4 == "scales"

    @property
    def features(self) -> tuple[int, int]:
        """(outputs, inputs) of the weight, or of each expert that it stacks, without transposition
        and packing."""
        if self.mxfp4:
            # (experts, outputs, blocks) or (experts, outputs, blocks, bytes)
            outputs, num_blocks = self.shape[1:3]
            begin, end = self.mxfp4_columns or (0, num_blocks * MXFP4_BLOCK)
            return outputs, end - begin
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    def plain(self) -> "WeightSpec":
        """This spec without quantization and transposition."""
        return self._replace(transposed=False, part=None, scheme=None, mxfp4="")

    @property
    def is_stored_as_is(self) -> bool:
        """Whether the tensor's bytes, if its dtype is the parameter's dtype, are copied to the
        parameter unchanged."""
        changes = (self.transposed, self.offset, self.normalized, self.mxfp4, self.part)
        is_set = (self.interleaved_size, self.row_groups, self.row, self.repeats, self.leading_rows)
        return not (any(changes) or self.is_kv_scale) and all(value is None for value in is_set)

    def num_shards(self, output: int, num_ranks: int) -> int:
        """Number of distinct shards of `output` on `num_ranks` ranks."""
        return min(num_ranks, self.num_heads[output]) if self.num_heads else num_ranks

    @property
    def is_packed(self) -> bool:
        """Whether the tensor contains the blocks or the scales of an MXFP4 weight."""
        return bool(self.mxfp4)

    def packed_bytes(self) -> int | None:
        """Bytes of an MXFP4 weight that stays packed, including its scales; 0 for the tensor with
        the scales. None for a shard that begins or ends inside a block."""
        begin, end = self.mxfp4_columns or (0, 0)
        if begin % MXFP4_BLOCK or end % MXFP4_BLOCK:
            return None
        return self.num_elements() * (MXFP4_BLOCK // 2 + 1) // MXFP4_BLOCK

    def num_elements(self) -> int:
        """Number of elements of the parameter, or of the quantized weight, that the tensor fills; 0
        for the other tensors of a quantized weight."""
        if self.mxfp4 == "scales" or (self.part is not None and self.part.role != "values"):
            return 0
        if self.mxfp4_columns is not None:
            begin, end = self.mxfp4_columns
            return math.prod(self.shape[:-2]) * (end - begin)
        if self.leading_rows is not None:
            return self.leading_rows * math.prod(self.shape[1:])
        # A byte of blocks packs two values.
        return math.prod(self.shape) * (self.repeats or 1) * (2 if self.mxfp4 else 1)


@dataclass(frozen=True, slots=True)
class WeightMap:
    """The tensors of a model. Full names are as `map_name` returns them."""

    outer: tuple[WeightSpec, ...]
    """Tensors outside the layers."""
    layers: tuple[tuple[WeightSpec, ...], ...] = ()
    """Tensors of each layer, with names and parameters relative to the two prefixes below."""
    layer_prefix: str = ""
    """Prefix of the layer index in checkpoint names, such as `model.layers.`."""
    parameter_prefix: str = ""
    """Prefix of the layer index in parameter paths."""
    stripped_prefixes: tuple[str, ...] = ()
    """Prefixes that names in a checkpoint may have; `map_name` removes one prefix of a name."""
    default_prefix: str = ""
    """Prefix added to names that start with none of `known_prefixes`."""
    known_prefixes: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    """(old, new) substrings of names, for checkpoints with other names."""
    ignored_prefixes: tuple[str, ...] = ()
    """Name prefixes of tensors that are ignored if this map does not list them."""
    ignored_suffixes: tuple[str, ...] = ()
    optional: tuple[WeightSpec, ...] = ()
    """Tensors that a checkpoint may contain; some are alternative names of the same tensor."""
    alternatives: tuple[tuple[WeightSpec, ...], ...] = ()
    """Alternative groups of tensors of a layer. A checkpoint may contain a group instead of the
    tensors of `layers` with the same parameters, such as a stacked tensor of all experts instead of
    a tensor for each expert."""
    is_text_part: bool = False
    """Whether this map covers only the text model of a checkpoint with images or audio."""
    has_tower: bool = False
    """Whether the vision tower is loaded too; a separate map has its tensors."""

    def entries(self) -> Iterator[WeightSpec]:
        """The tensors of `outer` and `layers`, with full names and parameter paths."""
        yield from self.outer
        for index, layer in enumerate(self.layers):
            name, parameter = f"{self.layer_prefix}{index}.", f"{self.parameter_prefix}{index}."
            for spec in layer:
                yield spec._replace(name=name + spec.name, parameter=parameter + spec.parameter)

    def stored_as(self, shapes: Mapping[str, tuple[int, ...]]) -> "WeightMap":
        """This map for a checkpoint with the tensors `shapes`, whose names come from `map_name`. In
        a layer where the checkpoint has an alternative group instead of the tensors of `layers`,
        the group replaces these tensors."""
        if not self.alternatives:
            return self
        layers = tuple(
            self._layer_stored_as(f"{self.layer_prefix}{index}.", layer, shapes)
            for index, layer in enumerate(self.layers)
        )
        return replace(self, layers=layers)

    def _layer_stored_as(
        self, prefix: str, layer: tuple[WeightSpec, ...], shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[WeightSpec, ...]:
        def is_stored(group: Iterable[WeightSpec]) -> bool:
            found = ((spec, shapes.get(prefix + spec.name)) for spec in group)
            return all(shape is not None and spec.fits(shape) for spec, shape in found)

        for group in self.alternatives:
            parameters = {spec.parameter for spec in group}
            replaced = [spec for spec in layer if spec.parameter in parameters]
            if replaced and is_stored(group) and not is_stored(replaced):
                return (*(spec for spec in layer if spec.parameter not in parameters), *group)
        return layer

    def map_name(self, name: str) -> str:
        """Name in this map for the checkpoint name `name`. A tensor outside the text model gets the
        prefix OUTSIDE."""
        name = self.text_name(name)
        if name.startswith(OUTSIDE):
            return name
        for prefix in self.stripped_prefixes:
            if name.startswith(prefix):
                name = name[len(prefix) :]
                break
        for old, new in self.renamed:
            name = name.replace(old, new)
        if self.default_prefix and not name.startswith(self.known_prefixes):
            name = self.default_prefix + name
        return name

    def text_name(self, name: str) -> str:
        """Name of the tensor in a text-only checkpoint. A tensor outside the text model gets the
        prefix OUTSIDE."""
        return text_part_name(name) if self.is_text_part else name

    def ignores(self, name: str) -> bool:
        """Whether a tensor with the mapped name `name` that this map does not list may be
        ignored."""
        return name.startswith((OUTSIDE, *self.ignored_prefixes)) or name.endswith(
            self.ignored_suffixes
        )


class Axis(NamedTuple):
    """A dimension's size, and the config.json fields that determine it."""

    size: int
    fields: str


def matrix(name: str, rows: Axis, columns: Axis, *, shard_dim: int | None = None) -> WeightSpec:
    fields = f"{rows.fields} x {columns.fields}"
    return WeightSpec(name, (rows.size, columns.size), name, fields, shard_dim=shard_dim)


def linear(
    parameter: str,
    tensors: Mapping[str, Axis],
    columns: Axis,
    *,
    has_bias: bool,
    num_heads: tuple[int, ...] = (),
    fused: bool = False,
    fused_fields: str = "",
) -> Iterator[WeightSpec]:
    """The tensors of a column-parallel linear layer that merges the outputs `tensors`. `fused`: the
    checkpoint stores all outputs in a single tensor, named `parameter`."""
    sizes = tuple(axis.size for axis in tensors.values())
    parts: dict[str, tuple[Axis, tuple[int, ...]]] = {
        name: (axis, (index,)) for index, (name, axis) in enumerate(tensors.items())
    }
    if fused:
        parts = {parameter: (Axis(sum(sizes), fused_fields), tuple(range(len(sizes))))}
    for name, (rows, outputs) in parts.items():
        specs = [matrix(f"{name}.weight", rows, columns)._replace(parameter=f"{parameter}.weight")]
        if has_bias:
            specs.append(WeightSpec(f"{name}.bias", (rows.size,), f"{parameter}.bias"))
        for spec in specs:
            yield spec._replace(
                output_sizes=sizes, outputs=outputs, num_heads=num_heads, shard_dim=0
            )


def row_linear(
    name: str, rows: Axis, columns: Axis, *, has_bias: bool, parameter: str = ""
) -> Iterator[WeightSpec]:
    """The tensors of a row-parallel linear layer."""
    parameter = parameter or name
    weight = matrix(f"{name}.weight", rows, columns, shard_dim=1)
    yield weight._replace(parameter=f"{parameter}.weight")
    if has_bias:
        yield WeightSpec(f"{name}.bias", (rows.size,), f"{parameter}.bias")
