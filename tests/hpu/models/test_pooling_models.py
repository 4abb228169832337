"""Pooling models compared with transformers' forward in float32."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_encoders import ENCODERS, Reader, make_pooling, write_json, write_modules
from tiny_models import VOCAB_SIZE
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from config.errors import ConfigError
from config.model.read_config import read_model_config

TOLERANCE = 1e-5
LENGTHS = (9, 1, 40, 17, 40, 3)


def texts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def hidden_states(folder: Path, tokens: list[int], **inputs: Any) -> np.ndarray[Any, Any]:
    """Hidden states (tokens, hidden) from transformers."""
    model: Any = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = model(torch.tensor([tokens]), **inputs).last_hidden_state
    return states[0].numpy()  # type: ignore[no-any-return]


def logits(folder: Path, tokens: list[int], **inputs: Any) -> np.ndarray[Any, Any]:
    """Logits (labels,) from transformers."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens]), **inputs).logits[0].numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", [*ENCODERS, "llama", "mistral", "qwen2", "qwen3"])
def test_hidden_states_equal_transformers_in_any_batch(family: str, tmp_path: Path) -> None:
    folder = make_pooling(family, tmp_path)
    reader = Reader(folder)

    together = reader.read(texts(), by_token=True)
    alone = [reader.read([text], by_token=True)[0] for text in texts()]

    reader.worker.close()
    for text, item, other in zip(texts(), together, alone, strict=True):
        np.testing.assert_allclose(item, hidden_states(folder, text), atol=TOLERANCE)
        np.testing.assert_allclose(item, other, atol=TOLERANCE)


@pytest.mark.parametrize("family", [*ENCODERS, "llama", "qwen3"])
def test_a_heads_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    folder = make_pooling(family, tmp_path, num_labels=3)
    reader = Reader(folder)

    found = reader.read(texts(), normalizes=False)
    shares = reader.read(texts(), normalizes=True)

    reader.worker.close()
    assert reader.ready.pooling is not None
    assert (reader.ready.pooling.tasks, reader.ready.pooling.width) == (("classify",), 3)
    for text, entry, share in zip(texts(), found, shares, strict=True):
        expected = logits(folder, text)
        np.testing.assert_allclose(entry, [expected], atol=TOLERANCE)
        exponentials = np.exp(expected - expected.max())
        np.testing.assert_allclose(share, [exponentials / exponentials.sum()], atol=TOLERANCE)


def test_a_published_nomic_bert_equals_transformers(tmp_path: Path) -> None:
    folder = make_pooling("nomic_bert", tmp_path)
    expected = hidden_states(folder, texts()[0])
    config = json.loads((folder / "config.json").read_text())
    published = {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "activation_function": "swiglu",
        "layer_norm_epsilon": config["layer_norm_eps"],
        "n_embd": 64,
        "n_head": 4,
        "n_inner": 128,
        "n_layer": 2,
        "n_positions": 8192,
        "max_trained_positions": 130,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_scaling_factor": None,
        "rotary_emb_scale_base": None,
        "qkv_proj_bias": False,
        "type_vocab_size": 2,
        "vocab_size": VOCAB_SIZE,
    }
    write_json(folder / "config.json", published)
    assert read_model_config(str(folder)).max_position == 130
    reader = Reader(folder)

    (found,) = reader.read(texts()[:1], by_token=True)

    reader.worker.close()
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    write_json(folder / "config.json", {**published, "moe_every_n_layers": 2})
    with pytest.raises(ConfigError, match=r"moe_every_n_layers in .* is 2, only 0 is supported"):
        read_model_config(str(folder))


def test_the_second_text_of_a_pair_has_its_own_token_type(tmp_path: Path) -> None:
    folder = make_pooling("bert", tmp_path, num_labels=1)
    (text,) = texts([12])
    types = torch.tensor([[0] * 5 + [1] * 7])
    reader = Reader(folder)

    (found,) = reader.read([text], num_first=5, normalizes=True)
    (one_text,) = reader.read([text], normalizes=True)

    reader.worker.close()
    assert reader.ready.pooling is not None
    assert reader.ready.pooling.tasks == ("score", "classify")
    expected = logits(folder, text, token_type_ids=types)
    np.testing.assert_allclose(found, [1 / (1 + np.exp(-expected))], atol=TOLERANCE)
    assert abs(found - one_text) > 1e-3


@pytest.mark.parametrize("family", ["roberta", "distilbert", "qwen3"])
def test_a_model_without_pairs_concatenates_two_texts(family: str, tmp_path: Path) -> None:
    reader = Reader(make_pooling(family, tmp_path))

    (pair,) = reader.read(texts([12]), num_first=5)
    (read,) = reader.read(texts([12]))

    reader.worker.close()
    np.testing.assert_array_equal(pair, read)


def test_dense_modules_come_between_the_pooling_and_the_normalization(tmp_path: Path) -> None:
    folder = make_pooling("bert", tmp_path)
    pooling = {"pooling_mode": "mean"}
    write_modules(folder, "Transformer", "Pooling", "Dense", "Normalize", pooling=pooling)
    write_json(folder / "2_Dense" / "config.json", {"in_features": 64, "out_features": 10})
    weight, bias = torch.randn(10, 64), torch.randn(10)
    tensors = {"linear.weight": weight, "linear.bias": bias}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    reader = Reader(folder)

    found = reader.read(texts(), normalizes=True)

    reader.worker.close()
    for text, entry in zip(texts(), found, strict=True):
        mean = torch.from_numpy(hidden_states(folder, text)).mean(dim=0)
        expected = torch.tanh(weight @ mean + bias)
        np.testing.assert_allclose(entry, [expected / expected.norm()], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "family"), [(AutoModelForMaskedLM, "bert"), (AutoModelForCausalLM, "qwen3")]
)
def test_a_model_with_another_head_gives_its_hidden_states(
    kind: Any, family: str, tmp_path: Path
) -> None:
    folder = make_pooling(family, tmp_path)
    with torch.no_grad():
        kind.from_pretrained(folder).save_pretrained(folder)
    reader = Reader(folder, runner="pooling")

    (found,) = reader.read(texts([7]), by_token=True)

    reader.worker.close()
    np.testing.assert_allclose(found, hidden_states(folder, texts([7])[0]), atol=TOLERANCE)


def test_a_decoder_may_be_bidirectional(tmp_path: Path) -> None:
    folder = make_pooling("llama", tmp_path)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "is_causal": False}))
    left, other = texts([20, 8])
    reader = Reader(folder)

    together = reader.read([left, other], by_token=True)[1]
    changed = reader.read([[*other[:-1], 7]], by_token=True)[0]

    reader.worker.close()
    model: Any = AutoModel.from_pretrained(folder).eval()
    open_mask = torch.zeros(1, 1, len(other), len(other))
    with torch.no_grad():
        expected = model(torch.tensor([other]), attention_mask=open_mask).last_hidden_state[0]
    np.testing.assert_allclose(together, expected.numpy(), atol=TOLERANCE)
    assert np.abs(together[0] - changed[0]).max() > 1e-3


def test_a_text_with_a_nan_vector_affects_no_other_text(tmp_path: Path) -> None:
    folder = make_pooling("bert", tmp_path)
    model: Any = AutoModel.from_pretrained(folder)
    model.embeddings.word_embeddings.weight.data[4] = float("nan")
    model.save_pretrained(folder)
    good, bad = texts([9, 6])
    reader = Reader(folder)

    (broken, _), (rows, data) = reader.run([[*bad, 4], good])

    (alone,) = reader.read([good])
    reader.worker.close()
    assert (broken, rows) == (-1, 1)
    np.testing.assert_allclose(np.frombuffer(data, "<f4"), alone[0], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
    ],
)
def test_unsupported_encoders_are_refused(
    overrides: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = make_pooling("bert", tmp_path)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **overrides}))

    with pytest.raises(ConfigError, match=words):
        Reader(folder)
