"""QuantizationFormat: what a file of this folder says about a format. QuantizationConfig: a
checkpoint's checked quantization_config, and the list of tensors that store a quantized weight."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from config.expressions import START, Expressions
from config.kinds import Kinds
from config.model.json_fields import Fields, Json

EXPRESSION = "re:"
"""Prefix of regular expressions in lists of module names."""

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
    """Number of outputs or inputs that share an index; 0: all."""
    is_packed: bool = False
    """Whether they share an index because an int32 packs several values."""
    is_whole: bool = False
    """Whether every rank needs the whole axis."""

    def size(self, count: int) -> int:
        """Size of the axis for `count` outputs or inputs."""
        return -(-count // self.unit) if self.unit else 1


class WeightPart(NamedTuple):
    """A stored tensor of a quantized weight (out, in)."""

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
    """Index of the value in each position of an int32, from the lowest bits up; empty: natural
    order."""
    offset: int = 0
    """Offset added to integers, modulo 2^bits if they are packed."""
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
        """Whether a tensor of `shape` matches `expected`. Formats differ in dimensions of 1."""
        if self.role in ("codes", "state", "nested_codes"):
            return True
        if self.role in ("scales", "input_scale") or self.flat:
            return [dim for dim in shape if dim != 1] == [dim for dim in expected if dim != 1]
        return shape == expected


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How a weight is quantized: (values - zeros) * scales, in groups of inputs."""

    bits: int
    parts: tuple[WeightPart, ...]
    is_float: bool = False
    """Whether values are FP8 (e4m3) instead of integers."""
    group_size: int | None = None
    """Inputs that share a scale; None: all."""
    desc_act: bool = False
    """Whether groups consist of arbitrary inputs; a tensor gives the group of each input."""
    activations: Literal["none", "dynamic", "static"] = "none"
    """Quantization of activations: none, with a scale per token (dynamic), or with a scale from the
    checkpoint (static)."""
    is_flat: bool = False
    """Whether the weight is stored flat, in memory order and in blocks. Each rank reads the whole
    weight and dequantizes it during loading."""

    @property
    def middle(self) -> int:
        """The zero point of integers without zero points in the checkpoint."""
        return 1 << (self.bits - 1)

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group_size is None else -(-in_features // self.group_size)


class Rule(NamedTuple):
    """A scheme and the modules that use it."""

    targets: tuple[str, ...]
    """Module names or patterns, as in QuantizationConfig.ignored; `Linear`: all linear layers."""
    scheme: WeightScheme


class Overrides(NamedTuple):
    """Modules with their own schemes."""

    patterns: tuple[str, ...] = ()
    """Regular expressions that follow EXPRESSION. The first matching expression applies."""
    schemes: tuple[WeightScheme | None, ...] = ()
    """The scheme for each of `patterns`; None: the module is not quantized."""


NO_OVERRIDES = Overrides()


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How the weights of a checkpoint are quantized."""

    method: str
    """quant_method, which is also the value of --quantization."""
    rules: tuple[Rule, ...]
    """Rules in order; the first rule that matches a module applies."""
    overrides: Overrides = NO_OVERRIDES
    """Overrides, which precede `ignored` and `rules`."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantized: module names, parts of names between dots, or regular
    expressions after `re:`."""
    has_head: bool = False
    """Whether the output head is quantized, unless it is ignored."""
    ignored_suffixes: tuple[str, ...] = ()
    """Suffixes of tensor names that a checkpoint may hold and the model does not need."""
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
    """The compiled regular expressions among `names` (entries with the prefix EXPRESSION). Raises
    ConfigError."""
    found = [name.removeprefix(EXPRESSION) for name in names if name.startswith(EXPRESSION)]
    return Expressions(found, where, START)


def _selects(patterns: tuple[str, ...], module: str) -> bool:
    """Whether any of `patterns` (as in QuantizationConfig.ignored) names `module`."""
    if _first(patterns, module) is not None:
        return True
    names = _names(module)
    plain = (name for name in patterns if not name.startswith(EXPRESSION))
    return any(
        pattern.endswith(f".{module}") or any(f".{pattern}." in f".{name}." for name in names)
        for pattern in plain
    )


def _first(patterns: tuple[str, ...], module: str) -> int | None:
    """Index, among the regular expressions in `patterns`, of the first expression that matches
    `module`."""
    if not patterns:
        return None
    found = (expressions(patterns).first(name) for name in _names(module))
    return min((index for index in found if index is not None), default=None)


def _names(module: str) -> tuple[str, ...]:
    """Possible names of `module` in the files: the name itself, and two longer names in multimodal
    checkpoints."""
    inner = module.removeprefix("model.")
    return (module, f"language_model.{module}", f"model.language_model.{inner}")


def packed_axis(of: int, bits: int) -> StoredAxis:
    """Axis of int32 elements that pack values of `bits` bits."""
    return StoredAxis(of, INT32_BITS // bits, is_packed=True)


_BITS = ("bits", "w_bit")

Packing = tuple[Fields, Callable[[Fields], WeightScheme]]
"""Settings of integers that AutoRound wrote, and the reader of their scheme."""


def _with_bits(settings: Fields) -> Json | None:
    return settings.raw if any(name in settings.raw for name in _BITS) else None


def no_packing(packing: str, settings: Fields) -> Packing | None:
    """QuantizationFormat.auto_round of a format in whose packing AutoRound does not write."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationFormat:
    """A format of quantized checkpoints."""

    read: Callable[[Fields], QuantizationConfig]
    """Reads the settings. Raises ConfigError for unsupported settings."""
    methods: tuple[str, ...] = ()
    """Further values of quant_method. The name of the format is a value, too."""
    spellings: tuple[str, ...] = ()
    """Further values of --quantization: kernels of vLLM for the format."""
    config_key: str = "quantization_config"
    """Key of the settings in early config.json files."""
    marks: tuple[str, ...] = ()
    """Fields that identify settings without quant_method. Any field suffices."""
    file: str = ""
    """File with the settings of checkpoints whose config.json has none."""
    in_file: Callable[[Fields], Json | None] = _with_bits
    """Returns the settings in the content of `file`; None: the weights are not quantized."""
    auto_round: Callable[[str, Fields], Packing | None] = no_packing
    """Returns the Packing for an AutoRound `packing_format` that packs as this format does."""


QUANTIZATION_FORMATS = Kinds[QuantizationFormat](
    "config.model.quantization", "FORMATS", "quantization format"
)
