"""Creates a tokenizer.json from a tiktoken vocabulary, for checkpoints whose tokenizer is remote
code. The remote code is never run."""

import base64
import binascii
import json
from pathlib import Path

from config.checkpoint.gguf_tokenizer import LLAMA3_SPLIT, byte_alphabet, check_pairs
from config.errors import ConfigError
from config.json_text import Json
from config.model.json_fields import shown

VOCABULARY = "tokenizer.model"
SPLITS = {"ChatGLM4Tokenizer": LLAMA3_SPLIT}
"""tokenizer_class -> pre-tokenization pattern."""
PREFIXES = {"ChatGLM4Tokenizer": ("[gMASK]", "<sop>")}
"""tokenizer_class -> special tokens before every text."""
MAX_TOKENS = 2**20
MAX_ADDED_IDS = 2**16
"""Maximum distance of added token ids from the end of the vocabulary."""


def write_tokenizer(folder: Path, config: Json, target: Path) -> bool:
    """Write the tokenizer.json of the checkpoint `folder` to `target`; returns False if the folder
    has no tiktoken vocabulary, or the tokenizer_class in `config` (its tokenizer_config.json) is
    unknown. Raises ConfigError."""
    name = config.get("tokenizer_class")
    if not isinstance(name, str) or name not in SPLITS or not (folder / VOCABULARY).is_file():
        return False
    made = _tokenizer(_ranks(folder / VOCABULARY), config, name)
    (target / "tokenizer.json").write_text(json.dumps(made))
    return True


def _ranks(file: Path) -> dict[bytes, int]:
    """Token bytes -> rank, which is the token id. Each line of the file has a token in base64 and
    its rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            if not rank.isdigit():
                raise ValueError
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(
                f"line {number} of {file} is {shown(line.decode(errors='replace'))}, it must be a "
                "token in base64 and its rank"
            ) from None
    if not 0 < len(ranks) <= MAX_TOKENS:
        raise ConfigError(f"{file} has {len(ranks)} tokens, it must have 1 to {MAX_TOKENS}")
    check_pairs(str(file), map(len, ranks))
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
    added = _added_tokens(config, len(ranks))
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
            # A piece that is in the vocabulary becomes a single token.
            "ignore_merges": True,
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": [[spelled[token] for token in pair] for pair in _merges(ranks)],
        },
    }


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All pairs of tokens that form a token, in the order of that token's rank."""
    pairs = [
        (rank, ranks[token[:end]], ranks[token[end:]], (token[:end], token[end:]))
        for token, rank in ranks.items()
        for end in range(1, len(token))
        if token[:end] in ranks and token[end:] in ranks
    ]
    return [pair for *_, pair in sorted(pairs)]


def _added_tokens(config: Json, num_tokens: int) -> list[Json]:
    """Entries of `added_tokens_decoder`, whose ids follow the `num_tokens` ids of the
    vocabulary."""
    stored = config.get("added_tokens_decoder")
    entries = list(stored.items()) if isinstance(stored, dict) else []
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        added = [
            {
                "id": int(number),
                "content": str(entry["content"]),
                **{name: bool(entry.get(name, False)) for name in names},
            }
            for number, entry in sorted(entries, key=lambda item: int(item[0]))
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "added_tokens_decoder in tokenizer_config.json is not in the format of transformers: "
            f"{error!r}"
        ) from error
    last = num_tokens + MAX_ADDED_IDS - 1
    for number in map(int, (number for number, _ in entries)):
        if not num_tokens <= number <= last:
            raise ConfigError(
                f"added_tokens_decoder in tokenizer_config.json has the id {number}, it must be "
                f"{num_tokens} to {last}"
            )
    return added


def _post_processor(name: str, ids: dict[str, int]) -> Json | None:
    """Post-processor that adds the prefix of the class before a text; None without a prefix. Raises
    ConfigError if a token of the prefix does not exist."""
    prefix = PREFIXES.get(name, ())
    if not prefix:
        return None
    for token in prefix:
        if token not in ids:
            raise ConfigError(
                f"added_tokens_decoder in tokenizer_config.json has no token {token}, which {name} "
                "adds before each text"
            )
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
