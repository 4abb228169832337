"""Pooling on a device: each mode compared with its formula, computed text by text and without
padding."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from config.model.model_config import ModelConfig
from config.model.pooler import PoolerConfig
from config.model.sentence_transformers import MODES
from config.params.pooling import PoolingFacts
from hpu.models.pooler import Pooler, PoolingInputs

Floats = npt.NDArray[np.float64]

HIDDEN, QUERY = 6, 7
MODEL = ModelConfig("", "BertModel", 9, HIDDEN, 4, 1, 1, 1, HIDDEN, QUERY)
TEXTS = [(7, 0, 6, 1), (1, 0, 4, 0), (5, 2, 6, 0), (4, 3, 2, 1)]
"""(tokens, skipped, dimensions, normalizes)"""
PADDED = (0, 0, 6, 1)

FORMULAS: dict[str, Any] = {
    "cls": lambda part, first: part[0],
    "lasttoken": lambda part, first: part[-1],
    "max": lambda part, first: part.max(axis=0),
    "mean": lambda part, first: part.mean(axis=0),
    "mean_sqrt_len_tokens": lambda part, first: part.sum(axis=0) / np.sqrt(len(part)),
    "weightedmean": lambda part, first: np.average(
        part, axis=0, weights=np.arange(first, len(part) + first) + 1
    ),
}


def pooler(*modes: str) -> Pooler:
    width = HIDDEN * len(modes)
    facts = PoolingFacts(tasks=("embed",), width=width, token_width=HIDDEN)
    return Pooler(PoolerConfig(modes, facts), MODEL, torch.device("cpu"))


def inputs(rows: list[tuple[int, int, int, int]]) -> PoolingInputs:
    columns = [[max(tokens, 1), skipped, cut, normal] for tokens, skipped, cut, normal in rows]
    lengths = torch.tensor([row[0] for row in rows])
    starts = torch.arange(len(rows)) * QUERY
    ends, skipped, cuts, normal = torch.tensor(columns).T
    return PoolingInputs(lengths, skipped, starts + skipped, starts + ends - 1, cuts, normal)


def expected(part: Floats, cut: int, normal: int) -> Floats:
    kept = np.where(np.arange(len(part)) < cut, part, 0)
    return kept / np.linalg.norm(kept) if normal else kept


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_equals_its_formula_over_the_pooled_tokens(mode: str) -> None:
    hidden = torch.randn(len(TEXTS) + 1, QUERY, HIDDEN)
    for row, (tokens, *_) in enumerate(TEXTS):
        hidden[row, tokens:] = float("nan")  # Padding must not affect the result.

    found = pooler(mode)(hidden, inputs([*TEXTS, PADDED]))

    for row, (tokens, skipped, cut, normal) in enumerate(TEXTS):
        part = hidden[row, skipped:tokens].double().numpy()
        want = expected(FORMULAS[mode](part, skipped), cut, normal)
        np.testing.assert_allclose(found[row].numpy(), want, atol=1e-6)
    assert found.isfinite().all()


def test_several_modes_are_concatenated() -> None:
    hidden, asked = torch.randn(2, QUERY, HIDDEN), inputs([(4, 0, 12, 0), (7, 0, 12, 0)])

    found = pooler("cls", "mean")(hidden, asked)

    parts = [pooler(mode)(hidden, asked) for mode in ("cls", "mean")]
    assert torch.equal(found, torch.cat(parts, dim=-1))


def test_a_narrower_width_keeps_the_leading_dimensions_normalized_to_length_1() -> None:
    hidden, asked = torch.randn(1, QUERY, HIDDEN), inputs([(4, 0, HIDDEN, 1)])
    whole = pooler("mean")
    facts = PoolingFacts(tasks=("embed",), width=2, token_width=HIDDEN)
    narrow = Pooler(replace(whole.config, facts=facts), MODEL, torch.device("cpu"))

    found = narrow(hidden, asked)

    leading = whole(hidden, asked)[:, :2]
    torch.testing.assert_close(found, leading / leading.norm(dim=-1, keepdim=True))


def test_token_vectors_are_truncated_and_normalized_separately() -> None:
    hidden = torch.randn(2, QUERY, HIDDEN)

    found = pooler("mean").by_token(hidden, inputs([(7, 0, 3, 1), (7, 0, 6, 0)]))

    for place, (row, token) in enumerate(itertools.product(range(2), range(QUERY))):
        want = expected(hidden[row, token].double().numpy(), (3, 6)[row], 1 - row)
        np.testing.assert_allclose(
            found.flatten(0, 1)[place].numpy(), want, atol=1e-6, err_msg=str((row, token))
        )
