"""QuantizationFormat: registry entry of a format. QuantizationConfig: the validated
quantization_config of a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from config.expressions import START, Expressions
from config.json_text import Json
from config.kinds import Kinds
from config.model.json_fields import Fields

EXPRESSION = "re:"
"""Prefix of regular expressions in lists of module names."""

NEVER_QUANTIZED = ("lm_head", r"re:.*\.(gate|router)$", r"re:.*shared_expert_gate$")
"""Modules that are not quantized while loading: the head, routers of experts, and gates of shared
experts."""

OUTPUTS, INPUTS = 0, 1
"""Dimensions of a linear weight (out, in)."""
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
points, subtracted before scaling; groups: group index of each input; input_scale: activation scale;
shape: sizes of the weight. For a flat weight, blocks: block scales; codes: table of dequantized
values; state: sizes in JSON; nested_blocks and nested_codes: blocks and codes of quantized
scales."""

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
    """Whether several outputs or inputs share an index because an int32 packs their values."""
    is_whole: bool = False
    """Whether every rank needs the whole axis."""

    def size(self, count: int) -> int:
        """Size of the axis for `count` outputs or inputs."""
        return -(-count // self.unit) if self.unit else 1


class WeightPart(NamedTuple):
    """A stored tensor of a quantized weight with the logical shape (out, in)."""

    role: Role
    suffix: str
    """Suffix of the tensor name after the module name."""
    axes: tuple[StoredAxis, ...]
    """Axes of the tensor; empty: a scalar for the whole weight, or a tensor whose dimensions are
    not outputs and inputs (the role shape, and the tensors of a flat weight)."""
    dtypes: tuple[str, ...]
    """Accepted dtypes, as spelled in safetensors headers."""
    bits: int = 0
    """Bits per value; 0 for tensors without integer values."""
    order: tuple[int, ...] = ()
    """Index of the value at each position of an int32, lowest bits first; empty: natural order."""
    offset: int = 0
    """Offset added to integers, modulo 2^bits if they are packed."""
    factor: float = 1.0
    """Factor applied to scales."""
    flat: int = 0
    """Number of consecutive elements of a flat weight per entry. 0: the weight is not flat, or the
    number is not fixed."""

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Shape of the tensor in the file; () for codes and states, which may have any shape."""
        if self.role == "shape":
            return (2,)
        if self.flat:
            return (-(-out_features * in_features // self.flat),)
        sizes = (out_features, in_features)
        return tuple(axis.size(sizes[axis.of]) for axis in self.axes)

    def fits(self, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        """Whether a tensor of `shape` has the `expected` shape. Dimensions of size 1 are ignored
        for scales and flat tensors, because formats write them differently. Codes and states may
        have any shape."""
        if self.role in ("codes", "state", "nested_codes"):
            return True
        if self.role in ("scales", "input_scale") or self.flat:
            return [dim for dim in shape if dim != 1] == [dim for dim in expected if dim != 1]
        return shape == expected


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Quantization scheme of a weight: (values - zeros) * scales, in groups of inputs."""

    bits: int
    parts: tuple[WeightPart, ...]
    is_float: bool = False
    """Whether values are FP8 (e4m3) instead of integers."""
    group_size: int | None = None
    """Number of inputs per scale; None: all."""
    desc_act: bool = False
    """Whether groups consist of arbitrary inputs (act-order); a tensor gives the group of each
    input."""
    activations: Literal["none", "dynamic", "static"] = "none"
    """Activation quantization: none, dynamic (scale per token), or static (scale from the
    checkpoint)."""
    is_flat: bool = False
    """Whether the weight is stored as flat blocks in memory order. Each rank reads the whole weight
    and dequantizes it during loading."""

    @property
    def middle(self) -> int:
        """Zero point of integers if the checkpoint stores no zero points."""
        return 1 << (self.bits - 1)

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group_size is None else -(-in_features // self.group_size)


class Rule(NamedTuple):
    """A scheme and the modules that use it."""

    targets: tuple[str, ...]
    """Module names or patterns, as in QuantizationConfig.ignored; `Linear`: all linear layers."""
    scheme: WeightScheme


class Overrides(NamedTuple):
    """Quantization overrides for single modules."""

    patterns: tuple[str, ...] = ()
    """Regular expressions, with the prefix EXPRESSION. The first match applies."""
    schemes: tuple[WeightScheme | None, ...] = ()
    """Scheme for each entry of `patterns`; None: the module is not quantized."""


NO_OVERRIDES = Overrides()


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Quantization of a checkpoint's weights."""

    method: str
    """Name of the format, as in quant_method and --quantization."""
    rules: tuple[Rule, ...]
    """Rules in order; the first rule that matches a module applies."""
    overrides: Overrides = NO_OVERRIDES
    """Overrides, which take precedence over `ignored` and `rules`."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantized: module names, components of names between dots, or regular
    expressions with the prefix `re:`."""
    has_head: bool = False
    """Whether the output head is quantized, unless it is ignored."""
    ignored_suffixes: tuple[str, ...] = ()
    """Suffixes of tensor names that are ignored if the model does not have the tensor."""
    stacked: WeightScheme | None = None
    """Scheme of stacked experts, with a tensor per stacked weight and part. A part's suffix follows
    the tensor name without a dot. None: quantized experts are stored separately."""

    @property
    def schemes(self) -> tuple[WeightScheme, ...]:
        """All schemes: of the overrides, of the rules, and `stacked`."""
        optional = (*self.overrides.schemes, self.stacked)
        own = (scheme for scheme in optional if scheme is not None)
        return (*own, *(rule.scheme for rule in self.rules))

    def scheme_of(self, module: str) -> WeightScheme | None:
        """Scheme of the linear layer with the checkpoint name `module`; None: not quantized."""
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
    """Index of the first regular expression in `patterns` that matches `module`, counting only
    expressions; None: no match."""
    if not patterns:
        return None
    found = (expressions(patterns).first(name) for name in _names(module))
    return min((index for index in found if index is not None), default=None)


def _names(module: str) -> tuple[str, ...]:
    """Possible names of `module` in the files: the name itself, and two longer names for multimodal
    checkpoints."""
    inner = module.removeprefix("model.")
    return (module, f"language_model.{module}", f"model.language_model.{inner}")


def packed_axis(of: int, bits: int) -> StoredAxis:
    """Axis of int32 elements that each pack 32 / `bits` values."""
    return StoredAxis(of, INT32_BITS // bits, is_packed=True)


_BITS = ("bits", "w_bit")

Packing = tuple[Fields, Callable[[Fields], WeightScheme]]
"""(settings, function that returns the scheme for settings) of integers written by AutoRound."""


def _with_bits(settings: Fields) -> Json | None:
    return settings.raw if any(name in settings.raw for name in _BITS) else None


def no_packing(packing: str, settings: Fields) -> Packing | None:
    """QuantizationFormat.auto_round for a format whose packing AutoRound does not use."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationFormat:
    """Registry entry of a quantization format."""

    read: Callable[[Fields], QuantizationConfig]
    """Reads the quantization config. Raises ConfigError."""
    methods: tuple[str, ...] = ()
    """Additional values of quant_method, besides the format's name."""
    spellings: tuple[str, ...] = ()
    """Additional values of --quantization, such as names of vLLM's kernels for the format."""
    config_key: str = "quantization_config"
    """Key of the settings in config.json files of early releases; by default the current key."""
    marks: tuple[str, ...] = ()
    """Fields that identify the format if quant_method is absent. A single field that is true is
    enough."""
    file: str = ""
    """File with the settings, for checkpoints without settings in config.json."""
    in_file: Callable[[Fields], Json | None] = _with_bits
    """Extracts the settings from the content of `file`; None: the weights are not quantized."""
    auto_round: Callable[[str, Fields], Packing | None] = no_packing
    """Returns the Packing for an AutoRound `packing_format` that packs as this format does."""
    at_load: tuple[WeightScheme, ...] = ()
    """Scheme to which --quantization quantizes plain weights while loading; empty: this format is
    read from checkpoints only."""


QUANTIZATION_FORMATS = Kinds[QuantizationFormat](
    "config.model.quantization", "FORMATS", "quantization format"
)
