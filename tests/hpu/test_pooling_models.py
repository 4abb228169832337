"""Pooling models against the plain forward of transformers in float32."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_encoders import ENCODERS, Reader, make_pooling
from tiny_models import VOCAB_SIZE
from transformers import AutoModel, AutoModelForSequenceClassification

TOLERANCE = 1e-5
LENGTHS = (9, 1, 40, 17, 40, 3)


def texts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def hidden_states(folder: Path, tokens: list[int], **inputs: Any) -> np.ndarray[Any, Any]:
    """(tokens, hidden) of transformers."""
    model: Any = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = model(torch.tensor([tokens]), **inputs).last_hidden_state
    return states[0].numpy()  # type: ignore[no-any-return]


def logits(folder: Path, tokens: list[int], **inputs: Any) -> np.ndarray[Any, Any]:
    """(labels,) of transformers."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens]), **inputs).logits[0].numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", [*ENCODERS, "llama", "mistral", "qwen2", "qwen3"])
def test_hidden_states_are_those_of_transformers_whatever_the_neighbours(
    family: str, tmp_path: Path
) -> None:
    folder = make_pooling(family, tmp_path)
    reader = Reader(folder)

    together = reader.read(texts(), by_token=True)
    alone = [reader.read([text], by_token=True)[0] for text in texts()]

    reader.worker.close()
    for text, one, other in zip(texts(), together, alone, strict=True):
        np.testing.assert_allclose(one, hidden_states(folder, text), atol=TOLERANCE)
        np.testing.assert_allclose(one, other, atol=TOLERANCE)
