"""Rope fields of config.json, merged from rope_scaling and rope_parameters."""

from config.json_text import Json
from config.model.json_fields import Fields, shown
from config.model.model_config import DEFAULT_THETA, LAYER_TYPES

_FULL = LAYER_TYPES[0]
_TYPES = ("rope_type", "type")
_OWN_FIELDS = ("rope_theta", "partial_rotary_factor")
"""Top-level fields of config.json that apply to a rope object without these fields."""


def rope_fields(fields: Fields) -> Json:
    """The rope of config.json: rope_parameters (transformers 5) or rope_scaling (transformers 4).
    The rules for a file with both are the rules of transformers 5.24, except for mrope_ fields:

    1. rope_scaling replaces rope_parameters. The fields of rope_parameters, including rope_theta,
    have no effect, except mrope_ fields, which transformers ignores.

    2. If only rope_parameters has an object per layer type, rope_scaling is merged into the object
    of full_attention.

    An absent, null or empty object is ignored.
    """
    parameters = fields.get("rope_parameters", dict, None) or {}
    scaling = fields.get("rope_scaling", dict, None) or {}
    if not scaling or not parameters:
        return scaling or parameters
    if is_nested(parameters) and not is_nested(scaling):
        full = Fields(parameters, fields.file).get(_FULL, dict, {})
        return {**parameters, _FULL: {**full, **scaling}}
    # mrope_section belongs to the model, not to a user's scaling.
    sections = {name: value for name, value in parameters.items() if name.startswith("mrope_")}
    return {**sections, **scaling}


def is_nested(rope: Json) -> bool:
    """Whether `rope` has a separate object per layer type."""
    return any(isinstance(value, dict) for value in rope.values())


def describe_rope_conflict(fields: Fields) -> str:
    """Fields of rope_parameters whose values rope_scaling replaces or drops; empty if there are
    none."""
    parameters = fields.get("rope_parameters", dict, None) or {}
    if not fields.get("rope_scaling", dict, None) or not parameters:
        return ""
    read = rope_fields(fields)
    own = {name: fields.raw[name] for name in _OWN_FIELDS if fields.raw.get(name) is not None}
    given = _with_type(parameters)
    used = _with_type({"rope_theta": DEFAULT_THETA, **own, **read})
    lost = [name for name, value in given.items() if value != used.get(name)]
    return ", ".join(f"{name} {shown(given[name])}" for name in lost)


def _with_type(rope: Json) -> Json:
    """`rope` with its type in rope_type: `default` for an absent type and for mrope. A nested rope
    is unchanged."""
    if is_nested(rope):
        return rope
    kind = next((rope[name] for name in _TYPES if rope.get(name) is not None), "default")
    # mrope is not a scaling.
    kind = "default" if kind == "mrope" else kind
    return {**{name: value for name, value in rope.items() if name != "type"}, "rope_type": kind}
