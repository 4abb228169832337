"""Reads the quantization config of a checkpoint; quant_method selects the format."""

from collections import Counter
from pathlib import Path

from config.errors import ConfigError
from config.model.json_fields import Fields, read_json, shown
from config.model.quantization.base import (
    NEVER_QUANTIZED,
    QUANTIZATION_FORMATS,
    QuantizationConfig,
    Rule,
    WeightScheme,
)
from config.whole_files import is_present

_ALL = QUANTIZATION_FORMATS.all
METHODS = {method: form for name, form in _ALL.items() for method in (name, *form.methods)}
"""quant_method of a checkpoint -> its format."""
_WORDS = [(word, name) for name, form in _ALL.items() for word in (*form.methods, *form.spellings)]
_COUNTS = Counter(word for word, _ in _WORDS)
OTHER_NAMES = {word: name for word, name in _WORDS if _COUNTS[word] == 1}
"""Alternative name of a format in --quantization -> format."""
KERNELS = {
    word: tuple(name for other, name in _WORDS if other == word)
    for word, count in _COUNTS.items()
    if count > 1
}
"""Values of --quantization that name a vLLM kernel for several formats -> these formats."""
SCHEMES_AT_LOAD: dict[str, WeightScheme] = {
    name: form.at_load[0] for name, form in _ALL.items() if form.at_load
}
"""Formats to which plain weights are quantized while loading -> their scheme."""


def config_at_load(name: str) -> QuantizationConfig:
    """QuantizationConfig of weights that are quantized to the format `name`, a key of
    SCHEMES_AT_LOAD, while loading."""
    scheme = SCHEMES_AT_LOAD[name]
    return QuantizationConfig(
        name, (Rule(("Linear",), scheme),), ignored=NEVER_QUANTIZED, stacked=scheme
    )


def read_quantization(fields: Fields, known: tuple[str, ...] = ()) -> QuantizationConfig | None:
    """Quantization of the checkpoint with the config.json `fields`; None for unquantized weights,
    and for methods in `known`, which the model's family handles. Raises ConfigError."""
    own = _settings(fields)
    if own is None:
        return None
    method = own.raw["quant_method"]
    if method in known:
        return None
    if not isinstance(method, str) or method not in METHODS:
        named = shown(method)[1:-1] if isinstance(method, str) else "method unnamed"
        raise ConfigError(
            f"{own.file} has an unsupported quantization ({named}): use one of "
            f"{', '.join(METHODS)}, or weights in bfloat16, float16 or float32"
        )
    return METHODS[method].read(own)


def is_served(fields: Fields) -> bool:
    """Whether `read_quantization` supports the method of the checkpoint."""
    own = _settings(fields)
    return own is not None and own.raw["quant_method"] in METHODS


def _settings(fields: Fields) -> Fields | None:
    """Quantization settings, including quant_method, of the checkpoint with the config.json
    `fields`; None if its weights are not quantized."""
    own = fields.raw.get("quantization_config")
    if own:
        return _with_method(own, _marked(own), fields.file)
    for name, form in _ALL.items():
        if older := fields.raw.get(form.config_key):
            return _with_method(older, name, fields.file)
        file = fields.file.parent / form.file
        if form.file and is_present(file):
            settings = form.in_file(Fields(read_json(file), file))
            if settings is not None:
                return _with_method(settings, name, file)
    return None


def _marked(settings: object) -> str | None:
    """The format of `settings` without quant_method, identified by other fields, if any."""
    if not isinstance(settings, dict):
        return None
    found = (name for name, form in _ALL.items() if any(map(settings.get, form.marks)))
    return next(found, None)


def _with_method(raw: object, method: str | None, file: Path) -> Fields:
    if not isinstance(raw, dict):
        raise ConfigError(f"quantization_config in {file} is {shown(raw)}, it must be an object")
    return Fields({"quant_method": method, **raw}, file)
