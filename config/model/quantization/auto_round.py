"""AutoRound checkpoints: 4- or 8-bit integers in the packing of another format, FP8 with block
scales, and MXFP8."""

import re
from collections.abc import Callable
from dataclasses import replace

from config.model.json_fields import Fields
from config.model.quantization.base import (
    EXPRESSION,
    QUANTIZATION_FORMATS,
    Overrides,
    Packing,
    QuantizationConfig,
    QuantizationFormat,
    Rule,
    WeightScheme,
    no_packing,
)
from config.model.quantization.fields import checked_names, choice, refused
from config.model.quantization.fp8 import MX_BLOCK, mxfp8_scheme, read_fp8

HEAD = "lm_head"
QUANTIZED_BITS = 8
"""Maximum bits of a quantized weight; AutoRound writes 16 for an unquantized weight."""
_MXFP8_PACKING = "auto_round:llm_compressor"
_MX_TYPES = ("mx_fp", "mx_fp_rceil")
"""data_type values of MXFP8; the second rounds scales up."""
_EXPRESSION_SIGNS = frozenset("*+?^$()[]{}|\\")
"""A name in `extra_config` with any of these characters is a regular expression that may match any
part of a module name, as in vLLM."""


def read_auto_round(fields: Fields) -> QuantizationConfig:
    """Quantization of AutoRound checkpoints. Raises ConfigError."""
    if fields.raw.get("data_type") == "fp" and fields.raw.get("weight_block_size"):
        return _fp8(fields)
    if fields.raw.get("data_type") in _MX_TYPES:
        return _mxfp8(fields)
    _check_integers(fields)
    settings, scheme_of = _packing(fields)
    overrides, has_head = _overrides(settings, scheme_of)
    return QuantizationConfig(
        "auto-round",
        (Rule(_blocks(fields), scheme_of(settings)),),
        overrides,
        has_head=has_head,
        # AutoRound does not reorder inputs, so g_idx is not needed.
        ignored_suffixes=(".bias", ".g_idx"),
    )


def _fp8(fields: Fields) -> QuantizationConfig:
    found = read_fp8(fields)
    scheme = found.rules[0].scheme
    overrides, has_head = _overrides(fields, lambda own: scheme)
    rules = (Rule(_blocks(fields), scheme),)
    return replace(found, method="auto-round", rules=rules, overrides=overrides, has_head=has_head)


def _mxfp8(fields: Fields) -> QuantizationConfig:
    choice(fields, "packing_format", None, (_MXFP8_PACKING,))
    choice(fields, "act_data_type", "mx_fp", _MX_TYPES)

    def scheme_of(own: Fields) -> WeightScheme:
        for name, served in (("bits", 8), ("group_size", MX_BLOCK)):
            size = own.count(name)
            if size != served:
                raise refused(own, name, size, str(served))
        return mxfp8_scheme(
            "weight_scale", "dynamic" if own.get("act_bits", int, 16) == 8 else "none"
        )

    overrides, has_head = _overrides(fields, scheme_of)
    rules = (Rule(_blocks(fields), scheme_of(fields)),)
    return QuantizationConfig("auto-round", rules, overrides, has_head=has_head)


def _check_integers(fields: Fields) -> None:
    """Raise ConfigError for formats other than integer weight-only quantization."""
    kind = fields.get("data_type", str, "int")
    # Rounding variants such as int_sym_dq also start with int.
    if not kind.startswith("int"):
        raise refused(fields, "data_type", kind, "'int'")
    bits = fields.get("act_bits", int, 16)
    if bits < 16:
        raise refused(fields, "act_bits", bits, "16 (only weights are quantized)")
    for name in ("super_bits", "rotation_config"):
        if fields.raw.get(name):
            raise refused(fields, name, fields.raw[name], "null")


def _packing(fields: Fields) -> Packing:
    """Packing of the integers. Early releases call packing_format `backend`."""
    name = "packing_format" if fields.raw.get("packing_format") else "backend"
    packing = fields.get(name, str, "").replace("autoround", "auto_round")
    served = {
        method: form.auto_round
        for method, form in QUANTIZATION_FORMATS.all.items()
        if form.auto_round is not no_packing
    }
    for pack in served.values():
        if (found := pack(packing, fields)) is not None:
            return found
    names = " or ".join(f"auto_round:auto_{method}" for method in served)
    raise refused(fields, name, packing, f"auto_round, {names}")


def _blocks(fields: Fields) -> tuple[str, ...]:
    """Blocks whose linear layers are quantized; `Linear`: all blocks."""
    value = fields.raw.get("block_name_to_quantize")
    names = value.split(",") if isinstance(value, str) else value or []
    flat = [name for part in names for name in (part if isinstance(part, list) else [part])]
    if not all(isinstance(name, str) for name in flat):
        raise refused(fields, "block_name_to_quantize", value, "names of modules")
    return tuple(filter(None, map(str.strip, flat))) or ("Linear",)


def _overrides(
    fields: Fields, scheme_of: Callable[[Fields], WeightScheme]
) -> tuple[Overrides, bool]:
    """(overrides of single modules, names before expressions; whether the head is quantized, which
    needs its own entry)."""
    found: dict[bool, list[tuple[str, WeightScheme | None]]] = {False: [], True: []}
    has_head = False
    for name, changes in fields.get("extra_config", dict, {}).items():
        if not isinstance(changes, dict):
            raise refused(fields, "extra_config", changes, "an object for each module")
        own = Fields({**fields.raw, **changes}, fields.file)
        bits = own.get("bits", int, 16)
        scheme = scheme_of(own) if bits <= QUANTIZED_BITS else None
        is_expression = not _EXPRESSION_SIGNS.isdisjoint(name)
        pattern = f".*(?:{name})" if is_expression else f"{re.escape(name)}$"
        found[is_expression].append((f"{EXPRESSION}{pattern}", scheme))
        has_head = has_head or (HEAD in name and scheme is not None)
    both = found[False] + found[True]
    patterns = checked_names(fields, "extra_config", tuple(pattern for pattern, _ in both))
    return Overrides(patterns, tuple(scheme for _, scheme in both)), has_head


FORMATS = {"auto-round": QuantizationFormat(read=read_auto_round, methods=("intel/auto-round",))}
