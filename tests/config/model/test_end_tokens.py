"""End tokens of a checkpoint: config.json, generation_config.json and the tokenizer together."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.errors import ConfigError
from config.model.read_config import read_model_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
END = "<|im_end|>"


def _write(folder: Path, **files: Any) -> Path:
    """Write config.json with the fields of `config`, and a file for each other entry of `files`."""
    for name, value in {"config": {}, **files}.items():
        value = {**CONFIG, **value} if name == "config" else value
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def _ends(folder: Path) -> tuple[int, ...]:
    return read_model_config(str(folder)).eos_token_ids


ADDED = {"added_tokens": [{"id": 2, "content": END}], "model": {"vocab": {"a": 7}}}


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 0}, {"eos_token_id": 0}, (0, 2)),
        ({"eos_token_id": 0}, {"eos_token_id": None}, (0, 2)),
        ({"eos_token_id": None}, {"eos_token_id": [5, 6]}, (2, 5, 6)),
        ({"eos_token_id": [4, 5]}, {"eos_token_id": [5, 6]}, (2, 4, 5, 6)),
        ({"eos_token_id": 4}, {"temperature": 0.5}, (2, 4)),
        ({"eos_token_id": -1}, {}, (2,)),
        ({}, {}, (2,)),
    ],
)
def test_end_tokens_are_read_from_all_files(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any], ends: tuple[int, ...]
) -> None:
    _write(
        tmp_path,
        config=config,
        generation_config=generation,
        tokenizer_config={"eos_token": END},
        tokenizer=ADDED,
    )

    assert tuple(sorted(_ends(tmp_path))) == ends


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": {"content": END}}, "tokenizer": ADDED},
        {"special_tokens_map": {"eos_token": END}, "tokenizer": ADDED},
        {"tokenizer_config": {"eos_token": END}, "tokenizer": {"model": {"vocab": {END: 2}}}},
        {
            "tokenizer_config": {"eos_token": END},
            "tokenizer": {"model": {"vocab": [["a", 0.0], ["b", -1.0], [END, -2.0]]}},
        },
        {
            "tokenizer_config": {
                "eos_token": END,
                "added_tokens_decoder": {"1": {"content": "x"}, "2": {"content": END}},
            }
        },
        {"tokenizer_config": {"eos_token": END}, "added_tokens": {END: 2}},
        {"tokenizer_config": {"eos_token": END}, "vocab": {END: 2}},
        {"tokenizer_config": {"eos_token": END, "pad_token": END}, "tokenizer": ADDED},
    ],
)
def test_the_id_of_the_end_token_is_found_in_any_tokenizer_file(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    _write(tmp_path, **files)

    assert _ends(tmp_path) == (2,)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "<|absent|>"}, "tokenizer": ADDED},
        {"tokenizer_config": {"eos_token": END}},
        {"tokenizer_config": {"eos_token": None}, "tokenizer": ADDED},
        {"tokenizer_config": {"eos_token": ""}, "tokenizer": ADDED},
        {"tokenizer_config": [END], "tokenizer": ADDED},
        {"tokenizer_config": {"eos_token": END}, "vocab": {END: True}},
        {
            "tokenizer_config": {"eos_token": END},
            "tokenizer": {"added_tokens": [{"id": 320, "content": END}]},
        },
        {"tokenizer_config": {"eos_token": END, "added_tokens_decoder": {"x": {"content": END}}}},
    ],
)
def test_an_end_token_of_the_tokenizer_without_a_valid_id_is_ignored(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    _write(tmp_path, config={"eos_token_id": 7}, **files)

    assert _ends(tmp_path) == (7,)


def test_the_error_names_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    _write(tmp_path, tokenizer_config={"eos_token": END})
    (tmp_path / "tokenizer.json").write_text("{")

    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        _ends(tmp_path)
