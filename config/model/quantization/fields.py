"""Fields of quantization_config that several methods have."""

from config.errors import ConfigError
from config.model.json_fields import Fields, shown
from config.model.quantization.base import expressions

FLOATS = ("F16", "BF16", "F32")
KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")
"""Of caches in FP8: those of keys and values are read where the cache is in FP8."""


def choice(fields: Fields, name: str, default: str | None, allowed: tuple[str, ...]) -> str:
    """A string of `allowed`. Raises ConfigError."""
    value = fields.get(name, str, default)
    if value not in allowed:
        raise refused(fields, name, value, f"one of {', '.join(allowed)}")
    return str(value)


def refused(fields: Fields, name: str, value: object, allowed: str) -> ConfigError:
    """For a value that is not served."""
    return ConfigError(
        f"{name} of quantization_config in {fields.file} is {shown(value)}, served is {allowed}"
    )


def integer_bits(fields: Fields, *names: str) -> int:
    """4 or 8, from the first of the fields `names` that is there."""
    name = next((one for one in names if fields.raw.get(one) is not None), names[0])
    bits = fields.count(name)
    if bits not in (4, 8):
        raise refused(fields, name, bits, "4 or 8")
    return bits


def group_size(fields: Fields, *names: str) -> int | None:
    """Inputs that share a scale; None: all (-1, or none of the fields `names` is there)."""
    name = next((one for one in names if fields.raw.get(one) is not None), names[0])
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
        for one in fields.get(name, list, []):
            if not isinstance(one, str):
                raise refused(fields, name, one, "a list of names of modules")
            found.append(one)
    return checked_names(fields, " or ".join(names), tuple(found))


def checked_names(fields: Fields, where: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """`names` of modules in the field `where`. ConfigError for regular expressions among them that
    cannot be matched."""
    expressions(names, f"{where} of quantization_config in {fields.file}")
    return names
