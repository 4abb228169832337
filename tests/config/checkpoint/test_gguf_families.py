"""A GGUF file of each family gives the tensors and the model config of the checkpoint that it was
made from."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf_families import CASES, architecture_of, with_mxfp4, write_case, write_checkpoint
from safetensors.numpy import load_file
from tiny_gguf import BERT_SPECIAL, WORDS
from tokenizers import Tokenizer
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

from config.checkpoint.gguf import converted
from config.checkpoint.gguf_families import FAMILIES
from config.checkpoint.gguf_metadata import open_gguf
from config.errors import ConfigError
from config.model.architectures import decoder_spec
from config.model.model_config import ModelConfig
from config.model.read_config import read_model_config
from config.model.sentence_transformers import read_sentence_config

_OF_THE_FILE = {"path", "fields", "eos_token_ids", "bos_token_id", "generation_defaults"}
_UNUSED = {
    "PhiForCausalLM": {"attention_bias", "attention_out_bias"},
    "Starcoder2ForCausalLM": {"attention_bias", "attention_out_bias"},
    # The conversion leaves MTP layers out.
    "Glm4MoeForCausalLM": {"num_mtp_layers"},
}
"""Config fields that a family's spec does not depend on."""


def _differing(ours: Any, theirs: Any, *, unused: set[str]) -> dict[str, tuple[Any, Any]]:
    pairs = {
        field.name: (getattr(ours, field.name), getattr(theirs, field.name))
        for field in fields(ours)
        if field.name not in unused
    }
    # GGUF stores numbers in float32.
    return {
        name: (mine, other)
        for name, (mine, other) in pairs.items()
        if mine != other
        and not (isinstance(mine, float) and isinstance(other, float) and np.isclose(mine, other))
    }


def _facts(folder: Path) -> ModelConfig:
    return read_model_config(str(folder), allow_quantized=True)


@pytest.mark.parametrize("case", CASES)
def test_tensors_and_config_of_a_file_equal_the_checkpoint(tmp_path: Path, case: str) -> None:
    tensors = write_checkpoint(tmp_path / "hf", case)
    source = write_case(tmp_path / "m.gguf", case, with_mxfp4(tensors))

    folder = converted(source, tmp_path / "cache", dtype="float32", progress=False)

    found = load_file(folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, values in tensors.items():
        assert found[name].shape == values.shape, name
        # GGUF stores the norm weight plus 1, which is rounded.
        assert np.allclose(found[name], values, rtol=1e-5, atol=1e-6), name
    ours, theirs = _facts(folder), _facts(tmp_path / "hf")
    unused = _OF_THE_FILE | _UNUSED.get(theirs.architecture, set())
    assert _differing(ours, theirs, unused=unused | {"encoder"}) == {}
    if theirs.encoder is None:
        assert _differing(decoder_spec(ours), decoder_spec(theirs), unused=set()) == {}
    else:
        assert _differing(ours.encoder, theirs.encoder, unused=set()) == {}


def test_bert_tokens_equal_transformers(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "hf", "bert")
    source = write_case(tmp_path / "m.gguf", "bert", tensors, tokenizer="bert")
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join([*BERT_SPECIAL, *WORDS]), encoding="utf-8")

    folder = converted(source, tmp_path / "cache", progress=False)

    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = BertWordPieceTokenizer(str(vocab))
    for text in ("Hello worlds", "helloing, ab É 日a", "unknown hello", "", "[MASK] a"):
        assert ours.encode(text).ids == theirs.encode(text).ids, text
    assert ours.encode("a", "b").ids == theirs.encode("a", "b").ids
    assert ours.decode(ours.encode("hello worlds").ids) == "hello worlds"


@pytest.mark.parametrize(("kind", "mode"), [(1, "mean"), (2, "cls"), (3, "lasttoken")])
def test_the_pooling_type_of_a_file_is_used(tmp_path: Path, kind: int, mode: str) -> None:
    tensors = write_checkpoint(tmp_path / "hf", "bert")
    settings = {"pooling_type": kind}
    source = write_case(tmp_path / "m.gguf", "bert", tensors, settings=settings)

    folder = converted(source, tmp_path / "cache", progress=False)

    sentence = read_sentence_config(str(folder))
    assert sentence is not None and (sentence.modes, sentence.normalizes) == ((mode,), True)


def test_a_model_that_generates_has_no_pooling(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "hf", "qwen3")

    folder = converted(write_case(tmp_path / "m.gguf", "qwen3", tensors), tmp_path, progress=False)

    assert read_sentence_config(str(folder)) is None


@pytest.mark.parametrize(
    ("case", "settings", "message"),
    [
        ("qwen2", {"attention.head_count": 100}, "attention.key_length in .* is 0, it must be at"),
        ("qwen3moe", {"expert_count": 8}, "has 8 experts or heads for .*, the shape of .* is 4x"),
        (
            "deepseek2",
            {"attention.key_length_mla": 8},
            "applies rope to 8 dimensions of a head, which has 8",
        ),
        ("deepseek2", {"expert_gating_func": 3}, "expert_gating_func in .* is 3, it must be 1 "),
        (
            "deepseek2",
            {"attention.value_length_mla": 20},
            "a tensor of 4x16x32 for .*, its metadata requires 4x20x32",
        ),
        (
            "falcon",
            {"attention.head_count_kv": 4},
            "a tensor of 128x64 for .*, its metadata requires",
        ),
        (
            "gpt-oss",
            {"expert_feed_forward_length": 48},
            "a tensor of 96x64 for .*, its metadata requires 48x64",
        ),
        ("qwen35", {"ssm.inner_size": 9600}, "rows for .*, its metadata requires at least"),
        ("olmo2", {"attention.sliding_window": 9}, "is an OLMo 3"),
        (
            "granitehybrid",
            {"attention.head_count_kv": [0, 1, 2, 0]},
            r"head_count_kv in .* is \[0, 1, 2, 0\], all layers with attention must",
        ),
        ("granitehybrid", {"attention.head_count_kv": [0, 2]}, "has 2 entries, it must have 4"),
        ("granitehybrid", {"attention.head_count_kv": [0] * 4}, "all layers with attention must"),
        ("glm4moe", {"nextn_predict_layers": 3}, "num_hidden_layers"),
    ],
)
def test_the_error_names_settings_that_do_not_fit_the_tensors(
    tmp_path: Path, case: str, settings: dict[str, Any], message: str
) -> None:
    tensors = write_checkpoint(tmp_path / "hf", case)
    settings = {**CASES[case].settings, **settings}
    source = write_case(tmp_path / "m.gguf", case, tensors, settings=settings)

    with pytest.raises(ConfigError, match=message):
        converted(source, tmp_path / "cache", progress=False)


def test_the_error_names_a_missing_tensor(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "hf", "gemma2")
    del tensors["model.layers.1.post_feedforward_layernorm.weight"]
    source = write_case(tmp_path / "m.gguf", "gemma2", tensors)

    with pytest.raises(ConfigError, match=r"no tensor blk\.1\.post_ffw_norm\.weight, which"):
        converted(source, tmp_path / "cache", progress=False)


@pytest.mark.parametrize(
    ("case", "layers", "heads", "scalar"),
    # The sizes of Gemma 2 9B and 27B, and of Gemma 3 12B and 27B.
    [
        ("gemma2", 42, 16, 256),
        ("gemma2", 46, 32, 144),
        ("gemma3", 48, 16, 256),
        ("gemma3", 62, 32, 168),
    ],
)
def test_the_query_scale_of_gemma_follows_from_the_number_of_layers(
    tmp_path: Path, case: str, layers: int, heads: int, scalar: int
) -> None:
    file = open_gguf(write_case(tmp_path / "m.gguf", case, write_checkpoint(tmp_path / "hf", case)))
    hidden = {42: 3584, 46: 4608, 48: 3840, 62: 5376}[layers]
    config = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "head_dim": 128 if layers in (46, 62) else 256,
        "rope_theta": 10000.0,
    }

    fields = FAMILIES[case].derive(file, config)

    assert fields["query_pre_attn_scalar"] == scalar


def test_an_adapter_file_is_refused_as_a_model(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_type("adapter")
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(ConfigError, match="is a LoRA adapter, not a model"):
        converted(tmp_path / "m.gguf", tmp_path / "cache", progress=False)


def test_fused_qkv_is_split_if_the_checkpoint_has_three_tensors(
    tmp_path: Path,
) -> None:
    tensors = write_checkpoint(tmp_path / "hf", "phi2")
    stored = {n: t for n, t in tensors.items() if not re.search(r"\.[qkv]_proj\.", n)}
    for layer in range(2):
        for kind in ("weight", "bias"):
            names = [f"model.layers.{layer}.self_attn.{part}_proj.{kind}" for part in "qkv"]
            fused = f"blk.{layer}.attn_qkv.{kind}"
            stored[fused] = np.concatenate([tensors[name] for name in names])
    source = write_case(tmp_path / "m.gguf", "phi2", stored)

    folder = converted(source, tmp_path / "cache", dtype="float32", progress=False)

    found = load_file(folder / "model.safetensors")
    assert all(np.array_equal(found[name], values) for name, values in tensors.items())


def test_every_architecture_of_the_table_is_compared() -> None:
    assert {architecture_of(case) for case in CASES} == set(FAMILIES)
    named = {name for family in FAMILIES.values() for name in (family.name, *family.others)}
    assert {case.name for case in CASES.values()} == named
