"""Creates tokenizer.json and tokenizer_config.json from the metadata of a GGUF file. The converters
of transformers are not used: they are private, and differ between 4.51 and 5 in modules and in the
rules for `tokenizer.ggml.pre`."""

from collections.abc import Iterable, Mapping

from config.checkpoint.gguf_metadata import GgufFile
from config.errors import ConfigError
from config.json_text import Json
from config.model.json_fields import shown

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenization pattern of Llama 3, GLM-4 and other families."""

MAX_PAIR_CHARACTERS = 2**28
"""Limit on the sum of squared token lengths, if merges are computed from scores: every way to split
a token in two is tried. For a vocabulary of 262,144 tokens the sum is about 30 million."""
MAX_TOKEN_CHARACTERS = 1024
"""Maximum token length if merges are computed from scores."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"

# Pre-tokenization patterns, as published by each family.
_QWEN2 = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}{_REST}"
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{_SHORTENED}|{_WORD}{_UPPER}+{_LOWER}*{_SHORTENED}"
    rf"|\p{{N}}{{1,3}}{_REST}"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), LLAMA3_SPLIT
    ),
    **dict.fromkeys(("glm4", "chatglm-bpe"), LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
    "tekken": _TEKKEN,
    "qwen35": _QWEN35,
}
_CHINESE, _HAN = (
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEQUENCES: Mapping[str, tuple[str, ...]] = {
    "deepseek-v3": (r"\p{N}{1,3}", _CHINESE, _DEEPSEEK3),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "deepseek-llm": (
        r"[\r\n]",
        # Letters of scripts with upper and lower case.
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _HAN,
        r"\p{N}",
    ),
}
"""Rules with several patterns, applied in sequence."""
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_GPT2 = ("gpt-2", "gpt2", "default", "olmo", "mpt", "jais", "phi-2", "roberta-bpe")
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
"""Rules with ignore_merges: a piece that is in the vocabulary becomes a single token. Texts begin
with bos unless the file disables it."""


def tokenizer_files(file: GgufFile) -> dict[str, Json] | None:
    """File name -> content; None if the file has no tokenizer. Raises ConfigError, also for an
    unknown tokenizer kind or split rule: a guess would produce tokens that the model was not
    trained on."""
    kind = file.value("tokenizer.ggml.model", str)
    if kind is None or "tokenizer.ggml.tokens" not in file.metadata:
        return None
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _wordpiece}
    if kind not in builders:
        raise ConfigError(
            f"{file.path} has a tokenizer of kind {shown(kind)}, it must be one of "
            f"{', '.join(builders)}"
        )
    tokenizer = {"version": "1.0", "truncation": None, "padding": None}
    tokenizer.update(builders[kind](file))
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _tokenizer_config(file)}


def _tokens(file: GgufFile) -> list[tuple[str, int]]:
    """(text, type) of each id."""
    tokens = file.values("tokenizer.ggml.tokens", str) or []
    kinds = file.values("tokenizer.ggml.token_type", int) or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ConfigError(
            f"{file.path} has {len(tokens)} tokens and {len(kinds)} token types, the numbers must "
            "be equal"
        )
    return list(zip(tokens, kinds, strict=True))


def _byte_level(file: GgufFile) -> Json:
    pre = file.value("tokenizer.ggml.pre", str) or "default"
    alphabet = byte_alphabet()
    letters = set(alphabet)

    def spelled(token: str, kind: int) -> str:
        # Added tokens are matched literally; all other tokens must be written in the byte alphabet.
        if kind != _NORMAL or letters.issuperset(token):
            return token
        return "".join(alphabet[byte] for byte in token.encode())

    tokens = _tokens(file)
    merges = [merge.split(" ") for merge in file.values("tokenizer.ggml.merges", str) or []]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": bool(file.value("tokenizer.ggml.add_space_prefix", bool)),
        "trim_offsets": True,
    }
    return {
        "added_tokens": _added_tokens(tokens, (_CONTROL,)),
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer(file, pre, byte_level),
        "post_processor": _post_processor(file),
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _WHOLE_WORDS,
            "vocab": {spelled(token, kind): number for number, (token, kind) in enumerate(tokens)},
            "merges": merges,
        },
    }


def _pre_tokenizer(file: GgufFile, pre: str, byte_level: Json) -> Json:
    if pre in _GPT2:
        return {**byte_level, "use_regex": True}
    if pre in _SINGLE_DIGITS:
        first = {"type": "Digits", "individual_digits": True}
        second = {**byte_level, "use_regex": True}
        return _in_order(first, second)
    if pre == "falcon":
        return _in_order(
            {"type": "Punctuation", "behavior": "Contiguous"},
            {**byte_level, "use_regex": True},
            {"type": "Digits", "individual_digits": False},
            _split("[0-9][0-9][0-9]"),
        )
    patterns = (_SPLITS[pre],) if pre in _SPLITS else _SEQUENCES.get(pre)
    if patterns is None:
        known = ", ".join(sorted((*_GPT2, *_SINGLE_DIGITS, *_SPLITS, *_SEQUENCES, "falcon")))
        raise ConfigError(
            f"{file.path} has the pre-tokenizer {shown(pre)}, it must be one of {known}"
        )
    return _in_order(*map(_split, patterns), {**byte_level, "use_regex": False})


def _in_order(*pretokenizers: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(pretokenizers)}


def _split(pattern: str) -> Json:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _sentencepiece(file: GgufFile) -> Json:
    tokens = _tokens(file)
    vocab = {token: number for number, (token, _) in enumerate(tokens)}
    unknown = file.value("tokenizer.ggml.unknown_token_id", int)
    if unknown is not None and not 0 <= unknown < len(tokens):
        raise ConfigError(
            f"tokenizer.ggml.unknown_token_id in {file.path} is {unknown}, it must be between 0 "
            f"and {len(tokens) - 1}"
        )
    spaces: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if file.value("tokenizer.ggml.add_space_prefix", bool) is not False:
        spaces.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "added_tokens": _added_tokens(tokens, (_CONTROL, _UNKNOWN)),
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "post_processor": _post_processor(file),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown][0] if unknown is not None else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(file, vocab),
        },
    }


def _wordpiece(file: GgufFile) -> Json:
    """WordPiece tokenizer of BERT. GGUF files mark the start of a word with U+2581 instead of
    marking continuations with ##."""
    tokens = _tokens(file)
    vocab: dict[str, int] = {}
    for number, (token, kind) in enumerate(tokens):
        is_text = kind == _NORMAL
        text = token.removeprefix(_SPACE)
        vocab[f"##{text}" if is_text and text == token else text] = number
    # Files do not say whether text is lowercased: assume so if no token has a capital letter.
    is_cased = any(token != token.lower() for token, kind in tokens if kind == _NORMAL)
    return {
        "added_tokens": _added_tokens(tokens, (_CONTROL, _UNKNOWN)),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": not is_cased,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _post_processor(file),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": _named(file)["unk"][0] if "unk" in _named(file) else "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }


def check_pairs(file: str, lengths: Iterable[int]) -> None:
    """Raise ConfigError if tokens of these lengths exceed the limits for computing merges."""
    longest, num_characters = 0, 0
    for length in lengths:
        longest, num_characters = max(longest, length), num_characters + length * length
    if num_characters > MAX_PAIR_CHARACTERS or longest > MAX_TOKEN_CHARACTERS:
        raise ConfigError(
            f"the merges of {file} cannot be computed: its longest token has {longest} characters "
            f"(at most {MAX_TOKEN_CHARACTERS}) and its squared token lengths sum to "
            f"{num_characters} (at most {MAX_PAIR_CHARACTERS})"
        )


def _merges(file: GgufFile, vocab: dict[str, int]) -> list[list[str]]:
    """The file's merges; without merges, every pair of tokens that forms a token, best score
    first."""
    if stored := file.values("tokenizer.ggml.merges", str):
        return [merge.split(" ") for merge in stored]
    scores = file.values("tokenizer.ggml.scores", float) or []
    if len(scores) < len(vocab):
        raise ConfigError(
            f"{file.path} has {len(vocab)} tokens and {len(scores)} scores, it must have a score "
            "for each token"
        )
    check_pairs(str(file.path), map(len, vocab))
    found = [
        (
            -scores[number],
            vocab[token[:split]],
            vocab[token[split:]],
            [token[:split], token[split:]],
        )
        for token, number in vocab.items()
        for split in range(1, len(token))
        if token[:split] in vocab and token[split:] in vocab
    ]
    found.sort(key=lambda merge: merge[:3])
    return [pair for *_, pair in found]


def _added_tokens(tokens: list[tuple[str, int]], special: tuple[int, ...]) -> list[Json]:
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special,
        }
        for number, (token, kind) in enumerate(tokens)
        if token and (kind in special or kind == _USER_DEFINED)
    ]


def _named(file: GgufFile) -> dict[str, tuple[str, int]]:
    """bos, eos, unk, pad, sep, cls, mask -> (text, id), if the file names them."""
    names = {
        "bos": "bos",
        "eos": "eos",
        "unknown": "unk",
        "padding": "pad",
        # llama.cpp's spelling.
        "seperator": "sep",
        "cls": "cls",
        "mask": "mask",
    }
    tokens = file.values("tokenizer.ggml.tokens", str) or []
    found = {}
    for name, ours in names.items():
        number = file.value(f"tokenizer.ggml.{name}_token_id", int)
        if number is not None and 0 <= number < len(tokens):
            found[ours] = (tokens[number], number)
    return found


def _adds(file: GgufFile, name: str) -> bool:
    adds = file.value(f"tokenizer.ggml.add_{name}_token", bool)
    if adds is not None:
        return adds
    kind, pre = (file.value(f"tokenizer.ggml.{key}", str) for key in ("model", "pre"))
    return kind == "bert" or (name == "bos" and (kind == "llama" or pre in _WHOLE_WORDS))


def _post_processor(file: GgufFile) -> Json | None:
    """Post-processor that adds bos and eos according to the file, cls and sep for BERT; None if it
    would add no token."""
    named = _named(file)
    is_bert = file.value("tokenizer.ggml.model", str) == "bert"
    first = named.get("cls", named.get("bos")) if is_bert else named.get("bos")
    last = named.get("sep", named.get("eos")) if is_bert else named.get("eos")
    before = [first] if first is not None and _adds(file, "bos") else []
    after = [last] if last is not None and _adds(file, "eos") else []
    if not before and not after:
        return None

    def part(name: str, type_id: int, before: list[tuple[str, int]]) -> list[Json]:
        return [
            *[{"SpecialToken": {"id": token, "type_id": type_id}} for token, _ in before],
            {"Sequence": {"id": name, "type_id": type_id}},
            *[{"SpecialToken": {"id": token, "type_id": type_id}} for token, _ in after],
        ]

    return {
        "type": "TemplateProcessing",
        "single": part("A", 0, before),
        # BERT adds cls only at the beginning.
        "pair": [*part("A", 0, before), *part("B", 1, [] if is_bert else before)],
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]}
            for token, number in (*before, *after)
        },
    }


def _tokenizer_config(file: GgufFile) -> Json:
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds(file, "bos"),
        "add_eos_token": _adds(file, "eos"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.count("context_length"),
    }
    config.update({f"{name}_token": token for name, (token, _) in _named(file).items()})
    if template := file.value("tokenizer.chat_template", str):
        config["chat_template"] = template
    return config


def byte_alphabet() -> list[str]:
    """The character that represents each byte in a byte-level vocabulary, as in GPT-2: the byte's
    own character if printable, otherwise the next unused character from U+0100 on."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 0x100 + hidden.index(byte)) for byte in range(256)]
