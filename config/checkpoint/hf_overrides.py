"""--hf-overrides: fields of config.json that a user sets without changing the checkpoint."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from config.cache_folder import cache_errors, cache_path, check_own, sync
from config.errors import ConfigError, SettingError
from config.json_text import Json, json_setting_problem, parse_json
from config.loading.env import cache_home
from config.model.json_fields import read_json
from config.model.read_config import read_model_config
from config.owned_directory import OwnedDirectory
from config.whole_folders import replace_folder

_FILE = "config.json"


def parse_overrides(text: str) -> Json:
    """The JSON object in `text`; an empty text is an empty object. Raises ConfigError."""
    try:
        value = parse_json(text or "{}")
    except ValueError as error:
        raise SettingError(
            f"--hf-overrides is {text!r}, "
            + json_setting_problem(error, '{"max_position_embeddings": 8192}')
        ) from None
    if not isinstance(value, dict):
        raise SettingError(f"--hf-overrides is {text!r}, it must be a JSON object")
    return value


def merged(config: Json, overrides: Mapping[str, Any]) -> Json:
    """`config` with the fields of `overrides`. Objects whose names end in `_config`, except
    quantization_config, are merged; other values are replaced, as in vLLM."""
    result = dict(config)
    for name, value in overrides.items():
        own = result.get(name)
        is_part = name.endswith("_config") and name != "quantization_config"
        if is_part and isinstance(own, dict) and isinstance(value, dict):
            value = merged(own, value)
        result[name] = value
    return result


def with_overrides(folder: str, text: str, cache_dir: str | None) -> str:
    """A cache folder with links to the files of `folder` and a merged config.json; `folder` itself
    if `text` has no overrides. Raises ConfigError, and leaves no folder, for a merged config.json
    that is not supported. A damaged folder is replaced."""
    overrides = parse_overrides(text)
    if not overrides:
        return folder
    source = Path(folder).absolute()
    config = merged(read_json(source / _FILE), overrides)
    content = json.dumps(config, ensure_ascii=False)
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise SettingError(
            f"config.json of {folder} with --hf-overrides has a lone surrogate at character "
            f"{error.start}, it must be valid Unicode text"
        ) from error
    names = sorted(path.name for path in source.iterdir() if path.name != _FILE)
    digest = hashlib.sha256("\0".join((str(source), content, *names)).encode(errors="replace"))
    target = cache_path(cache_dir or cache_home(), "hf-overrides") / digest.hexdigest()[:32]
    if target.is_dir():
        check_own(target)
    if _is_same(target, content, names):
        return str(target)
    with cache_errors(target.parent, "the overridden config.json"):
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with OwnedDirectory(".making-", target.parent) as made:
            fresh = Path(made, "folder")
            fresh.mkdir()
            (fresh / _FILE).write_text(content, encoding="utf-8")
            sync(fresh / _FILE)
            for name in names:
                (fresh / name).symlink_to(source / name)
            _check(fresh, source)
            # Another process may have created the folder first, with the same content.
            if not _is_same(target, content, names):
                replace_folder(fresh, target)
    return str(target)


def _is_same(folder: Path, content: str, names: Sequence[str]) -> bool:
    try:
        found = (folder / _FILE).read_bytes()
    except OSError:
        return False
    return found == content.encode() and all(os.path.lexists(folder / name) for name in names)


def _check(folder: Path, source: Path) -> None:
    try:
        read_model_config(str(folder), allow_quantized=True)
    except ConfigError as error:
        message = str(error).replace(str(folder), str(source))
        raise SettingError(f"with --hf-overrides, {message}") from None
