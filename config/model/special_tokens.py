"""Special tokens of a checkpoint's tokenizer: their texts, and the id of the EOS token."""

from pathlib import Path
from typing import Any

import msgspec

from config.checkpoint.tokenizer_bounds import MAX_TOKENIZER_BYTES
from config.errors import ConfigError
from config.json_text import Json
from config.model.json_fields import read_any_json
from config.whole_files import is_present, read_limited

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] | None = None


class _Model(msgspec.Struct):
    vocab: Any = None


class _ModelVocab(msgspec.Struct):
    model: _Model | None = None


def read_object(path: Path) -> Json:
    """The JSON object in `path`; empty if the file is missing or contains another value."""
    if not is_present(path):
        return {}
    loaded = read_any_json(path)
    return loaded if isinstance(loaded, dict) else {}


def token_text(token: object) -> str | None:
    """The text of a token in tokenizer_config.json: a string, or an object with `content`. None for
    an empty text or another value."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def special_tokens(folder: Path, config: Json) -> dict[str, str]:
    """Text of each of NAMED_TOKENS, from `config`, the tokenizer_config.json of `folder`, otherwise
    from special_tokens_map.json. Tokens without a text are omitted."""
    older = read_object(folder / "special_tokens_map.json")
    tokens = {
        name: token_text(config.get(name)) or token_text(older.get(name)) for name in NAMED_TOKENS
    }
    return {name: token for name, token in tokens.items() if token is not None}


def eos_token_id(folder: Path) -> int | None:
    """The id of the tokenizer's eos_token; None if the files define no such token or no id for it.
    The id is looked up in tokenizer.json, added_tokens_decoder of tokenizer_config.json,
    added_tokens.json and vocab.json, in this order. Raises ConfigError for a file that cannot be
    read."""
    config = read_object(folder / "tokenizer_config.json")
    text = special_tokens(folder, config).get("eos_token")
    if text is None:
        return None
    found = _id_in_tokenizer(folder / "tokenizer.json", text)
    if found is None:
        found = _id_in_decoder(config.get("added_tokens_decoder"), text)
    for name in ("added_tokens.json", "vocab.json"):
        if found is None:
            found = _integer(read_object(folder / name).get(text))
    return found


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _id_in_decoder(entries: object, text: str) -> int | None:
    if not isinstance(entries, dict):
        return None
    ids = [key for key, entry in entries.items() if token_text(entry) == text]
    return int(ids[0]) if ids and ids[0].isdecimal() and len(ids[0]) < 20 else None


def _id_in_tokenizer(file: Path, text: str) -> int | None:
    if not is_present(file):
        return None
    try:
        data = read_limited(file, MAX_TOKENIZER_BYTES, takes_pipes=False)
        # Two passes: nearly all EOS tokens are added tokens, and parsing a vocabulary of 35 MB is
        # slow.
        added = msgspec.json.decode(data, type=_AddedTokens).added_tokens or []
        for token in added:
            if token.content == text:
                return token.id
        model = msgspec.json.decode(data, type=_ModelVocab).model
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error!s:.300}") from error
    vocab = None if model is None else model.vocab
    if isinstance(vocab, dict):
        return _integer(vocab.get(text))
    if isinstance(vocab, list):
        # A Unigram model lists (piece, score) pairs in the order of ids.
        pieces = (entry[0] for entry in vocab if isinstance(entry, list) and entry)
        return next((number for number, piece in enumerate(pieces) if piece == text), None)
    return None
