"""QuantizationConfig: a checkpoint's quantization_config, checked; and how a quantized weight is
stored, as a list of tensors."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from config.expressions import START, Expressions

EXPRESSION = "re:"
"""What a regular expression begins with, among names of modules."""

OUTPUTS, INPUTS = 0, 1
"""Dimensions of the weight (out, in) of a linear layer."""
INT32_BITS = 32

Role = Literal[
    "values",
    "scales",
    "zeros",
    "groups",
    "input_scale",
    "shape",
    "blocks",
    "codes",
    "state",
    "nested_blocks",
    "nested_codes",
]
"""Role of a stored tensor. values: quantized values; scales: factors of the values; zeros: zero
points, subtracted before scaling; groups: the group of each input; input_scale: scale of
activations; shape: sizes of the weight. For a flat weight, blocks: scales of blocks; codes: table
of dequantized values; state: sizes in JSON; nested_blocks and nested_codes: blocks and codes of
quantized scales."""

PARAMETERS: dict[Role, str] = {
    "values": "qweight",
    "scales": "scales",
    "zeros": "qzeros",
    "groups": "g_idx",
    "input_scale": "input_scale",
}
"""Role -> name of the parameter of a quantized linear layer."""


class StoredAxis(NamedTuple):
    """A dimension of a stored tensor."""

    of: int
    """OUTPUTS or INPUTS."""
    unit: int = 1
    """How many of them share an index; 0: all."""
    is_packed: bool = False
    """They share it because an int32 has several values."""
    is_whole: bool = False
    """Every rank needs all of it."""

    def size(self, count: int) -> int:
        """For `count` outputs or inputs."""
        return -(-count // self.unit) if self.unit else 1


class WeightPart(NamedTuple):
    """One of the tensors that a quantized weight (out, in) is stored as."""

    role: Role
    suffix: str
    """Suffix of the tensor's name after the module's name."""
    axes: tuple[StoredAxis, ...]
    """Axes of the tensor; empty: a single number for the whole weight."""
    dtypes: tuple[str, ...]
    """Accepted dtypes, as spelled in safetensors headers."""
    bits: int = 0
    """Bits of an integer value; 0: no integers."""
    order: tuple[int, ...] = ()
    """Which of the values in an int32 is in its lowest bits, which in the next ones; empty: they
    are in their own order."""
    offset: int = 0
    """Added to integers, modulo 2^bits; to integers that are not packed, plainly."""
    factor: float = 1.0
    """Factor by which scales are multiplied."""
    flat: int = 0
    """Number of consecutive elements of a flat weight that share an entry; 0: not a flat weight, or
    any number."""

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        if self.role == "shape":
            return (2,)
        if self.flat:
            return (-(-out_features * in_features // self.flat),)
        sizes = (out_features, in_features)
        return tuple(axis.size(sizes[axis.of]) for axis in self.axes)

    def fits(self, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        """Whether a tensor of `shape` is one of `expected`: formats differ in dimensions of 1."""
        if self.role in ("codes", "state", "nested_codes"):
            return True
        if self.role in ("scales", "input_scale") or self.flat:
            return [one for one in shape if one != 1] == [one for one in expected if one != 1]
        return shape == expected


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How a weight is quantized: (values - zeros) * scales, in groups of inputs."""

    bits: int
    parts: tuple[WeightPart, ...]
    is_float: bool = False
    """FP8 (e4m3) values, not integers."""
    group_size: int | None = None
    """Inputs that share a scale; None: all."""
    block_rows: int = 1
    """Outputs that share a scale; 0: all."""
    is_symmetric: bool = True
    """Whether weights have no zero points. The zero point of integers is then the middle of their
    range."""
    desc_act: bool = False
    """Groups are not of neighbouring inputs: a tensor says which each input belongs to."""
    activations: Literal["none", "dynamic", "static"] = "none"
    """Quantization of activations: none, with a scale per token (dynamic), or with a scale from the
    checkpoint (static)."""
    is_flat: bool = False
    """The weight is a list of numbers in the order of memory, in blocks: each rank reads all of it,
    and dequantizes it while it is loaded."""

    @property
    def middle(self) -> int:
        """The zero point of symmetric integers."""
        return 1 << (self.bits - 1)

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group_size is None else -(-in_features // self.group_size)


class Rule(NamedTuple):
    """A scheme, and the modules that have it."""

    targets: tuple[str, ...]
    """Module names or patterns, as in QuantizationConfig.ignored; `Linear`: all linear layers."""
    scheme: WeightScheme


class Overrides(NamedTuple):
    """Modules with schemes of their own."""

    patterns: tuple[str, ...] = ()
    """Regular expressions behind EXPRESSION. The first expression that matches a module holds."""
    schemes: tuple[WeightScheme | None, ...] = ()
    """The scheme for each of `patterns`; None: the module is not quantized."""


NO_OVERRIDES = Overrides()


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How the weights of a checkpoint are quantized."""

    method: str
    """quant_method, which is also the value of --quantization."""
    rules: tuple[Rule, ...]
    """The first rule that matches a module holds."""
    overrides: Overrides = NO_OVERRIDES
    """Holds before `ignored` and `rules`."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantized: their names or parts of them, between dots; or behind `re:` a
    regular expression."""
    has_head: bool = False
    """Whether the output head is quantized, unless it is ignored."""
    ignored_suffixes: tuple[str, ...] = ()
    """Ends of the names of tensors that a checkpoint may hold and nobody needs."""
    stacked: WeightScheme | None = None
    """Scheme of experts that the checkpoint stacks in a tensor per projection. A part's suffix
    follows the tensor's name without a dot. None: quantized experts are stored separately."""

    @property
    def schemes(self) -> tuple[WeightScheme, ...]:
        """All schemes that a module may have."""
        own = (scheme for scheme in self.overrides.schemes if scheme is not None)
        return (*own, *(rule.scheme for rule in self.rules))

    def scheme_of(self, module: str) -> WeightScheme | None:
        """Scheme of the linear layer that the checkpoint calls `module`; None: the layer is not
        quantized."""
        index = _first(self.overrides.patterns, module)
        if index is not None:
            return self.overrides.schemes[index]
        if _selects(self.ignored, module):
            return None
        for rule in self.rules:
            if "Linear" in rule.targets or _selects(rule.targets, module):
                return rule.scheme
        return None


@lru_cache(maxsize=16)
def expressions(names: tuple[str, ...], where: str = "quantization_config") -> Expressions:
    """The compiled regular expressions among `names` (entries behind EXPRESSION). Raises
    ConfigError."""
    found = [name.removeprefix(EXPRESSION) for name in names if name.startswith(EXPRESSION)]
    return Expressions(found, where, START)


def _selects(patterns: tuple[str, ...], module: str) -> bool:
    """Whether one of `patterns`, as QuantizationConfig.ignored, names `module`."""
    if _first(patterns, module) is not None:
        return True
    names = _names(module)
    plain = (name for name in patterns if not name.startswith(EXPRESSION))
    return any(
        pattern.endswith(f".{module}") or any(f".{pattern}." in f".{name}." for name in names)
        for pattern in plain
    )


def _first(patterns: tuple[str, ...], module: str) -> int | None:
    """The index among the regular expressions in `patterns` of the first that matches `module`."""
    if not patterns:
        return None
    found = (expressions(patterns).first(name) for name in _names(module))
    return min((index for index in found if index is not None), default=None)


def _names(module: str) -> tuple[str, ...]:
    """The names of `module` in the files. The whole model of a text model has longer names, of two
    kinds."""
    inner = module.removeprefix("model.")
    return (module, f"language_model.{module}", f"model.language_model.{inner}")


def packed_axis(of: int, bits: int) -> StoredAxis:
    """Axis of int32 elements that pack values of `bits` bits."""
    return StoredAxis(of, INT32_BITS // bits, is_packed=True)
