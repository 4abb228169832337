"""Makes tokenizer.json from a vocabulary in the format of tiktoken, for tokenizers whose code is in
the checkpoint. That code is never run."""

import base64
import binascii
import json
from pathlib import Path

from config.checkpoint.byte_level import LLAMA3_SPLIT, byte_alphabet
from config.errors import ConfigError
from config.model.json_fields import Json, shown

VOCABULARY = "tokenizer.model"
SPLITS = {"ChatGLM4Tokenizer": LLAMA3_SPLIT}
"""tokenizer_class -> the pattern that splits a text before merges."""
PREFIXES = {"ChatGLM4Tokenizer": ("[gMASK]", "<sop>")}
"""tokenizer_class -> special tokens before every text."""
MAX_TOKENS = 2**20
MAX_TOKEN_BYTES = 1024


def write_tokenizer(folder: Path, config: Json, target: Path) -> bool:
    """Write the tokenizer.json of the checkpoint `folder` into `target`; False if the
    tokenizer_class in `config`, its tokenizer_config.json, has another format. Raises
    ConfigError."""
    name = config.get("tokenizer_class")
    if name not in SPLITS or not (folder / VOCABULARY).is_file():
        return False
    made = _tokenizer(_ranks(folder / VOCABULARY), config, str(name))
    (target / "tokenizer.json").write_text(json.dumps(made))
    return True


def _ranks(file: Path) -> dict[bytes, int]:
    """Token bytes -> rank, which is the token id. A line has the base64 of a token and its rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(
                f"line {number} of {file} is {shown(line.decode(errors='replace'))}, it must be a "
                "token in base64 and its rank"
            ) from None
    longest = max(map(len, ranks), default=0)
    if len(ranks) > MAX_TOKENS or longest > MAX_TOKEN_BYTES:
        raise ConfigError(
            f"{file} has {len(ranks)} tokens, the longest of {longest} bytes: at most {MAX_TOKENS} "
            f"of {MAX_TOKEN_BYTES} bytes are read"
        )
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(f"the ranks in {file} must be the numbers from 0 to {len(ranks) - 1}")
    return ranks


def _tokenizer(ranks: dict[bytes, int], config: Json, name: str) -> Json:
    alphabet = byte_alphabet()
    spelled = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    split = {
        "type": "Split",
        "pattern": {"Regex": SPLITS[name]},
        "behavior": "Isolated",
        "invert": False,
    }
    added = _added_tokens(config)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, {**byte_level, "use_regex": False}],
        },
        "post_processor": _post_processor(name, {token["content"]: token["id"] for token in added}),
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # A piece that is in the vocabulary is a token.
            "ignore_merges": True,
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": [[spelled[token] for token in pair] for pair in _merges(ranks)],
        },
    }


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All pairs of tokens that form a token, in the order of the rank of that token."""
    pairs = [
        (rank, ranks[token[:end]], ranks[token[end:]], (token[:end], token[end:]))
        for token, rank in ranks.items()
        for end in range(1, len(token))
        if token[:end] in ranks and token[end:] in ranks
    ]
    return [pair for *_, pair in sorted(pairs)]


def _added_tokens(config: Json) -> list[Json]:
    stored = config.get("added_tokens_decoder")
    entries = stored.items() if isinstance(stored, dict) else ()
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        return [
            {
                "id": int(number),
                "content": str(entry["content"]),
                **{name: bool(entry.get(name, False)) for name in names},
            }
            for number, entry in sorted(entries, key=lambda item: int(item[0]))
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"added_tokens_decoder in tokenizer_config.json has another form than transformers "
            f"writes: {error!r}"
        ) from error


def _post_processor(name: str, ids: dict[str, int]) -> Json | None:
    """Post-processor that puts the prefix of the class before a text."""
    prefix = PREFIXES.get(name, ())
    if not prefix or not ids.keys() >= set(prefix):
        return None
    before = [{"SpecialToken": {"id": token, "type_id": 0}} for token in prefix]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*before, text],
        "pair": [*before, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in prefix
        },
    }
