"""Readers for fields of quantization_config that several methods share."""

from collections.abc import Callable

from config.errors import ConfigError
from config.model.json_fields import Fields, shown
from config.model.quantization.base import EXPRESSION, Overrides, WeightScheme, expressions

FLOATS = ("F16", "BF16", "F32")
POWERS = ("U8", "F8_E8M0")
"""Dtypes of power-of-two scales: exponents with the bias of e8m0."""
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")
"""Name suffixes of KV-cache scales."""
_SKIPPED, _CHANGED = "-:", "+:"
"""Prefixes of patterns in `dynamic`: skip the matching modules, or change their settings."""


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
    """String field whose value must be in `allowed`. Raises ConfigError."""
    value = fields.get(name, str, default)
    if value not in allowed:
        raise refused(fields, name, value, f"one of {', '.join(allowed)}")
    return str(value)


def refused(fields: Fields, name: str, value: object, allowed: str) -> ConfigError:
    """The error for an unsupported value."""
    return ConfigError(
        f"{name} of quantization_config in {fields.file} is {shown(value)}, it must be {allowed}"
    )


def check_experts(fields: Fields, algorithm: str) -> None:
    """Raise ConfigError if the experts' format differs from `algorithm`, the format of the other
    layers."""
    choice(fields, "moe_quant_algo", algorithm, (algorithm,))
    choice(fields, "expert_dtype", "fp8", ("fp8",))


def integer_bits(fields: Fields, *names: str) -> int:
    """4 or 8, from the first of the fields `names` that is present."""
    name = next((name for name in names if fields.raw.get(name) is not None), names[0])
    bits = fields.count(name)
    if bits not in (4, 8):
        raise refused(fields, name, bits, "4 or 8")
    return bits


def group_size(fields: Fields, *names: str) -> int | None:
    """Number of inputs per scale; None: all (-1, or none of the fields `names` is present)."""
    name = next((name for name in names if fields.raw.get(name) is not None), names[0])
    value: int = fields.get(name, int, -1)
    if value == -1:
        return None
    if value < 1:
        raise refused(fields, name, value, "-1 (all inputs) or a positive number")
    return value


def module_names(fields: Fields, *names: str) -> tuple[str, ...]:
    """All entries of the list fields `names`, after the checks of `checked_names`. Raises
    ConfigError."""
    found: list[str] = []
    for name in names:
        for module in fields.get(name, list, []):
            if not isinstance(module, str):
                raise refused(fields, name, module, "a list of names of modules")
            found.append(module)
    return checked_names(fields, " or ".join(names), tuple(found))


def checked_names(fields: Fields, where: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return `names`, module names from the field `where`, after a check of the regular expressions
    among them. Raises ConfigError."""
    expressions(names, f"{where} of quantization_config in {fields.file}")
    return names
