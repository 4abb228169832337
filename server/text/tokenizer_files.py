"""Reads the tokenizer, special tokens and chat templates of a checkpoint."""

import hashlib
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from config.cache_folder import cache_errors, cache_path, check_own, check_room, sync
from config.checkpoint.tokenizer_bounds import (
    MAX_TOKENIZER_BYTES,
    TokenizerBounds,
    check_added_tokens,
    check_tokenizer_file,
)
from config.child_command import running
from config.errors import ConfigError
from config.json_text import Json
from config.model.json_fields import MAX_JSON_BYTES, shown
from config.model.special_tokens import read_object, special_tokens, token_text
from config.native import NativePanic, panics_as_errors
from config.owned_directory import OwnedDirectory
from config.progress import Report, unreported
from config.whole_files import is_present, read_limited
from config.whole_folders import is_whole, place_folder
from server.text.tiktoken_files import write_tokenizer

TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""transformers class for a tokenizer.json if the checkpoint names no class."""
CONVERTED_BYTES = 64 * 2**20
"""Disk space for a converted tokenizer; published tokenizers are below 40 MB."""
MAX_REASON = 300
"""Maximum characters of a library's error that are shown."""
CONVERT_TIMEOUT_S = 300
_UNLISTED = ("tokenizer.json",)
"""Files that a tokenizer converted by an earlier version must have to count as complete. Earlier
versions stored no file sizes."""
_POLL_S = 0.05

# Runs in a child process, because the conversion may import torch, which an API server never does.
_CONVERT = """
import sys
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True).save_pretrained(sys.argv[2])
"""


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Tokenizer, special tokens and chat templates of a checkpoint."""

    encoder: Encoder
    special_tokens: dict[str, str]
    """Name (bos_token, eos_token, ...) -> text of the special token."""
    chat_template: str | dict[str, str] | None
    bounds: TokenizerBounds = field(default_factory=TokenizerBounds)
    """Bounds on the tokenizer's time and on the growth of texts."""
    tokenizer_class: str = TOKENIZER_CLASS
    """transformers class named by the checkpoint."""


def read_text_files(path: str, cache_dir: Path) -> TextFiles:
    """Read a checkpoint's folder. Raises ConfigError."""
    folder, source = Path(path), tokenizer_folder(path, cache_dir)
    config = read_object(folder / "tokenizer_config.json") or read_object(
        source / "tokenizer_config.json"
    )
    bounds = check_tokenizer_file(source / "tokenizer.json")
    encoder = _encoder(source / "tokenizer.json")
    encoder.no_truncation()
    encoder.no_padding()
    named = special_tokens(folder, config)
    try:
        added = (config.get("added_tokens_decoder") or {}).values()
        contents = [entry["content"] for entry in added]
        check_added_tokens(folder / "tokenizer_config.json", contents)
        with panics_as_errors():
            _mark_special(encoder, config, named)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, NativePanic) as error:
        raise ConfigError(
            f"the added or special tokens in {folder / 'tokenizer_config.json'} are not in the "
            f"format of transformers: {error!r:.{MAX_REASON}}"
        ) from error
    given = config.get("tokenizer_class")
    tokenizer_class = given if isinstance(given, str) and given else TOKENIZER_CLASS
    template = _chat_template(folder, config)
    return TextFiles(encoder, named, template, bounds, tokenizer_class)


def _content(file: Path) -> bytes:
    try:
        return read_limited(file, MAX_TOKENIZER_BYTES, takes_pipes=False)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error


def _reason(error: Exception) -> str:
    """Text of an error, which may quote the file, as a single line."""
    return repr(str(error)[:MAX_REASON])[1:-1]


def _encoder(file: Path) -> Encoder:
    try:
        with panics_as_errors():
            return Encoder.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every problem with the file
        raise ConfigError(f"{file} cannot be read: {_reason(error)}") from error


def tokenizer_folder(path: str, cache_dir: Path, report: Report = unreported) -> Path:
    """The folder with the tokenizer.json of a checkpoint: the checkpoint's folder, or a cache
    folder with a tokenizer converted from older files, which may take a minute. Raises ConfigError,
    and the errors of `report`."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{path!r} is not a folder with tokenizer files")
    if is_present(folder / "tokenizer.json"):
        return folder
    return _converted(folder, cache_dir, report)


def _mark_special(encoder: Encoder, config: Json, named: dict[str, str]) -> None:
    """Mark tokens as special that only the configuration lists as special, and add tokens that only
    the configuration lists, if their ids follow the vocabulary."""
    known = {token.content: token for token in encoder.get_added_tokens_decoder().values()}
    added = config.get("added_tokens_decoder") or {}
    # The time of each library call grows with the number of added tokens.
    num_tokens, new = encoder.get_vocab_size(with_added_tokens=True), []
    for token_id, entry in sorted(added.items(), key=lambda item: int(item[0])):
        if entry["content"] not in known and int(token_id) == num_tokens:
            token = AddedToken(**{k: v for k, v in entry.items() if k != "__type"})
            new.append(token)
            known[token.content] = token
            # A token in the vocabulary keeps its id, and the library ignores an empty token.
            num_tokens += token.content != "" and encoder.token_to_id(token.content) is None
    encoder.add_tokens(new)
    more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    listed = more.values() if isinstance(more, dict) else more
    others = [content for token in listed if (content := token_text(token))]
    encoder.add_special_tokens(
        [
            AddedToken(content, special=True, normalized=False)
            for content in dict.fromkeys((*named.values(), *others))
            if encoder.token_to_id(content) is not None
            and not (content in known and known[content].special)
        ]
    )


def _chat_template(folder: Path, config: Json) -> str | dict[str, str] | None:
    """The chat template, or several templates by name. For each name, the first of these sources
    with a template of this name is used:

    1. chat_template.jinja (the name default) and additional_chat_templates/NAME.jinja.
    2. chat_template in the processor's files of a model with images: chat_template.json, then
       processor_config.json.
    3. chat_template in tokenizer_config.json, `config`.
    4. The files of 2, if the model has no processor.

    If 2 replaces the default template of 3, and there is no template tool_use, the replaced
    template becomes tool_use, the template for requests with tools: a processor's template often
    renders no tools.
    """
    own = _named_templates(config.get("chat_template"), folder / "tokenizer_config.json")
    processor: dict[str, str] = {}
    for name in ("processor_config.json", "chat_template.json"):
        stored = read_object(folder / name).get("chat_template")
        processor.update(_named_templates(stored, folder / name))
    files = {
        file.stem: _text(file) for file in (folder / "additional_chat_templates").glob("*.jinja")
    }
    if is_present(main := folder / "chat_template.jinja"):
        files["default"] = _text(main)
    # The order of transformers and vLLM: a processor's template contains image placeholders.
    has_processor = any(
        is_present(folder / name) for name in ("preprocessor_config.json", "processor_config.json")
    )
    templates = {**own, **processor, **files} if has_processor else {**processor, **own, **files}
    is_replaced = has_processor and "default" in processor and "default" not in files
    if is_replaced and own.get("default") not in (None, processor["default"]):
        templates.setdefault("tool_use", own["default"])
    if list(templates) == ["default"]:
        return templates["default"]
    return templates or None


def _named_templates(stored: object, file: Path) -> dict[str, str]:
    """Template name -> template. `stored`: a text (named default), a list, or an object of several
    templates."""
    if not stored:
        return {}
    if isinstance(stored, str):
        return {"default": stored}
    if isinstance(stored, dict):
        stored = [{"name": name, "template": text} for name, text in stored.items()]
    templates: dict[str, str] = {}
    for entry in stored if isinstance(stored, list) else [stored]:
        named = entry if isinstance(entry, dict) else {}
        name, text = named.get("name"), named.get("template")
        if not isinstance(name, str) or not isinstance(text, str):
            raise ConfigError(
                f"chat_template in {file} has {shown(entry)}, it must be a string, or a list of "
                "objects with name and template"
            )
        templates[name] = text
    return templates


def _text(file: Path) -> str:
    try:
        return read_limited(file, MAX_JSON_BYTES, takes_pipes=False).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _converted(folder: Path, cache_dir: Path, report: Report) -> Path:
    """The cache folder of a tokenizer.json that is converted once from older files. The folder is
    named by the hash of their contents; a damaged folder is made again."""
    names = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "tokenizer_config.json")
    files = [folder / name for name in names if is_present(folder / name)]
    if not any(file.name != "tokenizer_config.json" for file in files):
        raise ConfigError(
            f"{folder} has no tokenizer (tokenizer.json, tokenizer.model, vocab.json or "
            "vocab.txt): copy the tokenizer files of the base model into it, or serve token ids "
            "alone with --skip-tokenizer-init"
        )
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + _content(file))
    target = cache_path(str(cache_dir), "tokenizers") / digest.hexdigest()[:32]
    if target.is_dir():
        check_own(target)
    if not is_whole(target, _UNLISTED):
        _convert(folder, target, report)
    return target


def _convert(folder: Path, target: Path, report: Report) -> None:
    with cache_errors(target.parent, "the converted tokenizer"):
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_room(target.parent, CONVERTED_BYTES, "the converted tokenizer")
        _convert_into(folder, target, report)


def _convert_into(folder: Path, target: Path, report: Report) -> None:
    with OwnedDirectory(".converting-", target.parent) as made:
        fresh = Path(made, "tokenizer")
        fresh.mkdir()
        config = read_object(folder / "tokenizer_config.json")
        if not write_tokenizer(folder, config, fresh):
            command = [sys.executable, "-c", _CONVERT, str(folder), str(fresh)]
            why = _run(command, report, made)
            if why or not (fresh / "tokenizer.json").is_file():
                raise ConfigError(_not_converted(folder, config, why))
        # Another process may have finished first; either copy is valid.
        if not is_whole(target, _UNLISTED):
            sync(fresh / "tokenizer.json")
            place_folder(fresh, target)


def _not_converted(folder: Path, config: Json, why: str) -> str:
    if not config.get("auto_map"):
        why = (why or "no reason given")[:MAX_REASON]
        return f"the tokenizer in {folder} cannot be converted: {why}"
    return (
        f"the tokenizer in {folder} is a {shown(config.get('tokenizer_class'))}, whose code is in "
        "the checkpoint (auto_map in tokenizer_config.json), and code in a checkpoint is never "
        "run: put a tokenizer.json into the folder, or start with --skip-tokenizer-init to serve "
        "token ids alone"
    )


def _run(command: list[str], report: Report, folder: str) -> str:
    """Run `command`; returns the reason of a failure (last line of stderr, exit status or timeout),
    otherwise an empty text. Kills the process before it returns or raises."""
    end_s = time.monotonic() + CONVERT_TIMEOUT_S
    with tempfile.TemporaryFile("w+", errors="replace", dir=folder) as said:
        with running(command, stdout=subprocess.DEVNULL, stderr=said) as process:
            while process.poll() is None:
                if time.monotonic() > end_s:
                    return f"it took over {CONVERT_TIMEOUT_S} s"
                report("converting the tokenizer", 0, 0)
                time.sleep(_POLL_S)
        said.seek(0)
        lines = [line for line in said.read().splitlines() if line.strip()]
    return (lines or [f"status {process.returncode}"])[-1] if process.returncode else ""
