"""Reads how a checkpoint is quantized, by its quant_method."""

from pathlib import Path

from config.errors import ConfigError
from config.model.json_fields import Fields, read_json, shown
from config.model.quantization.base import QUANTIZATION_FORMATS, QuantizationConfig

_ALL = QUANTIZATION_FORMATS.all
METHODS = {method: form for name, form in _ALL.items() for method in (name, *form.methods)}
"""quant_method of a checkpoint -> its format."""
OTHER_NAMES = {
    word: name for name, form in _ALL.items() for word in (*form.methods, *form.spellings)
}
"""Other words for the name of a format in --quantization."""


def read_quantization(fields: Fields, known: tuple[str, ...] = ()) -> QuantizationConfig | None:
    """How the checkpoint with the config.json `fields` is quantized; None for weights that are not
    quantized, or quantized by a method in `known`, which the model's family reads. Raises
    ConfigError for a method that is not served."""
    own = _settings(fields)
    if own is None:
        return None
    method = own.raw["quant_method"]
    if method in known:
        return None
    if not isinstance(method, str) or method not in METHODS:
        named = shown(method)[1:-1] if isinstance(method, str) else "method unnamed"
        raise ConfigError(
            f"{own.file} says that its weights are quantized ({named}): served are "
            f"{', '.join(METHODS)}, and weights in bfloat16, float16 and float32"
        )
    return METHODS[method].read(own)


def is_served(fields: Fields) -> bool:
    """Whether `read_quantization` supports the method in config.json."""
    own = _settings(fields)
    return own is not None and own.raw["quant_method"] in METHODS


def _settings(fields: Fields) -> Fields | None:
    """Quantization settings, with quant_method, of the checkpoint whose config.json is `fields`;
    None if its weights are not quantized."""
    own = fields.raw.get("quantization_config")
    if own:
        return _with_method(own, _marked(own), fields.file)
    for name, form in _ALL.items():
        if older := fields.raw.get(form.config_key):
            return _with_method(older, name, fields.file)
        file = fields.file.parent / form.file
        if form.file and file.is_file():
            settings = form.in_file(Fields(read_json(file), file))
            if settings is not None:
                return _with_method(settings, name, file)
    return None


def _marked(settings: object) -> str | None:
    """The format of `settings` that identifies itself by other fields than quant_method."""
    if not isinstance(settings, dict):
        return None
    found = (name for name, form in _ALL.items() if any(map(settings.get, form.marks)))
    return next(found, None)


def _with_method(raw: object, method: str | None, file: Path) -> Fields:
    if not isinstance(raw, dict):
        raise ConfigError(f"quantization_config in {file} is {shown(raw)}, it must be an object")
    return Fields({"quant_method": method, **raw}, file)
