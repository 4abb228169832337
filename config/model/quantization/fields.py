"""Fields of quantization_config that several methods share."""

from collections.abc import Callable
from pathlib import Path

from config.errors import ConfigError
from config.model.json_fields import Fields, read_json, shown
from config.model.quantization.base import EXPRESSION, Overrides, WeightScheme, expressions

FLOATS = ("F16", "BF16", "F32")
POWERS = ("U8", "F8_E8M0")
"""Dtypes of scales that are powers of two: the exponents, with the bias of e8m0."""
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")
"""Name suffixes of scales of FP8 caches. Scales of keys and values are read if the cache is FP8."""


_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""File name -> quant_method of early AutoGPTQ and AutoAWQ checkpoints, whose config.json has no
quantization_config."""
_MODELOPT_FILE = "hf_quant_config.json"
"""File with the settings of NVIDIA's Model Optimizer; its first checkpoints have them only here."""
_BITS = ("bits", "w_bit")
_BITSANDBYTES = ("load_in_4bit", "load_in_8bit")
"""Fields of bitsandbytes, whose early checkpoints have no quant_method."""
_SKIPPED, _CHANGED = "-:", "+:"
"""Prefixes of patterns in `dynamic`: skip the modules, or change their settings."""


def quantization_fields(fields: Fields) -> Fields | None:
    """Quantization settings, with quant_method, of the checkpoint whose config.json is `fields`;
    None if its weights are not quantized."""
    own = fields.raw.get("quantization_config")
    if own:
        return _with_method(own, None, fields.file)
    # Name of compressed-tensors before release 0.6.
    older = fields.raw.get("compression_config")
    if older:
        return _with_method(older, "compressed-tensors", fields.file)
    for name, method in _FILES.items():
        file = fields.file.parent / name
        if file.is_file():
            raw = read_json(file)
            if any(field in raw for field in _BITS):
                return _with_method(raw, method, file)
    file = fields.file.parent / _MODELOPT_FILE
    if file.is_file():
        settings = Fields(read_json(file), file).get("quantization", dict, {})
        # null means that only the cache is FP8.
        if settings.get("quant_algo") is not None:
            return _with_method(settings, "modelopt", file)
    return None


def _with_method(raw: object, method: str | None, file: Path) -> Fields:
    if not isinstance(raw, dict):
        raise ConfigError(f"quantization_config in {file} is {shown(raw)}, it must be an object")
    if method is None and any(raw.get(name) for name in _BITSANDBYTES):
        method = "bitsandbytes"
    return Fields({"quant_method": method, **raw}, file)


def dynamic_overrides(fields: Fields, scheme_of: Callable[[Fields], WeightScheme]) -> Overrides:
    """Overrides from the patterns in `dynamic`, with the semantics of GPTQModel's dynamic_get."""
    patterns: list[str] = []
    schemes: list[WeightScheme | None] = []
    for name, changes in fields.get("dynamic", dict, {}).items():
        pattern = name.removeprefix(_SKIPPED).removeprefix(_CHANGED)
        patterns.append(f"{EXPRESSION}{pattern}")
        if name.startswith(_SKIPPED):
            schemes.append(None)
            continue
        if not isinstance(changes, dict):
            raise refused(fields, "dynamic", changes, "an object for each pattern")
        schemes.append(scheme_of(Fields({**fields.raw, **changes}, fields.file)))
    return Overrides(checked_names(fields, "dynamic", tuple(patterns)), tuple(schemes))


def choice(fields: Fields, name: str, default: str | None, allowed: tuple[str, ...]) -> str:
    """A string of `allowed`. Raises ConfigError."""
    value = fields.get(name, str, default)
    if value not in allowed:
        raise refused(fields, name, value, f"one of {', '.join(allowed)}")
    return str(value)


def refused(fields: Fields, name: str, value: object, allowed: str) -> ConfigError:
    """The error for an unsupported value."""
    return ConfigError(
        f"{name} of quantization_config in {fields.file} is {shown(value)}, served is {allowed}"
    )


def check_experts(fields: Fields, algorithm: str) -> None:
    """Raise ConfigError if experts have another format than `algorithm`, the format of the other
    layers."""
    choice(fields, "moe_quant_algo", algorithm, (algorithm,))
    choice(fields, "expert_dtype", "fp8", ("fp8",))


def integer_bits(fields: Fields, *names: str) -> int:
    """4 or 8, from the first of the fields `names` that is there."""
    name = next((name for name in names if fields.raw.get(name) is not None), names[0])
    bits = fields.count(name)
    if bits not in (4, 8):
        raise refused(fields, name, bits, "4 or 8")
    return bits


def group_size(fields: Fields, *names: str) -> int | None:
    """Inputs that share a scale; None: all (-1, or none of the fields `names` is there)."""
    name = next((name for name in names if fields.raw.get(name) is not None), names[0])
    value: int = fields.get(name, int, -1)
    if value == -1:
        return None
    if value < 1:
        raise refused(fields, name, value, "-1, for all inputs, or a positive number")
    return value


def module_names(fields: Fields, *names: str) -> tuple[str, ...]:
    """All modules in the lists `names`, with regular expressions that can be matched."""
    found: list[str] = []
    for name in names:
        for module in fields.get(name, list, []):
            if not isinstance(module, str):
                raise refused(fields, name, module, "a list of names of modules")
            found.append(module)
    return checked_names(fields, " or ".join(names), tuple(found))


def checked_names(fields: Fields, where: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """`names` of modules in the field `where`. Raises ConfigError for regular expressions among
    them that cannot be matched."""
    expressions(names, f"{where} of quantization_config in {fields.file}")
    return names
