"""Tokens that tie with the k-th token: all are kept, or exactly k tokens are."""

import numpy as np
import pytest
import torch
from emulated import emulated
from hypothesis import given
from hypothesis import strategies as st

from config.execution import HPU_GRAPHS, ExecutionConfig, ModeChoice
from hpu.backends.base import Backend
from hpu.backends.cpu import CpuBackend
from hpu.backends.gaudi import GaudiBackend
from hpu.protocol import RequestSampling
from hpu.sampling.filters import cut_ties, keep_ties, ties_of
from hpu.sampling.sampler import Sampler

VOCAB, ROWS = 256, 64
CPU = CpuBackend(torch.get_num_threads())
TIED = [3, 70, 71, 140, 255]


@given(st.data())
def test_exactly_k_of_the_largest_weights_are_kept(data: st.DataObject) -> None:
    rows = data.draw(
        st.lists(st.lists(st.integers(1, 6), min_size=9, max_size=9), min_size=1, max_size=4)
    )
    top_k = data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
    size = data.draw(st.integers(max(*top_k, 1), 9))
    weights = torch.tensor(rows, dtype=torch.float32)

    found = cut_ties(weights, torch.tensor(top_k).unsqueeze(1), size)

    for row, kept, count in zip(weights, found, top_k, strict=True):
        chosen = kept > 0
        assert int(chosen.sum()) == (count or 9)
        assert torch.equal(kept[chosen], row[chosen])
        assert sorted(kept[chosen].tolist()) == sorted(row.tolist())[-(count or 9) :]


def _drawn(backend: Backend, *, keeps: bool, static_shapes: bool) -> set[int]:
    """Tokens that many requests with top_k 3 draw from five tokens that tie."""
    sampler = Sampler(
        ROWS + 1, VOCAB, backend, static_shapes=static_shapes, ties=ties_of(keeps=keeps)
    )
    for row in range(ROWS):
        sampling = RequestSampling(temperature=1.0, top_k=3, top_p=0.999, seed=row)
        sampler.add_request(row, sampling, np.zeros(1, np.uint32), 1)
    logits = torch.zeros(ROWS, VOCAB)
    logits[:, TIED] = 5.0
    with torch.inference_mode():
        target = backend.zeros(tuple(logits.shape), logits.dtype)
        backend.upload(target, logits)
        backend.event()
        return set(sampler.sample(target, list(range(ROWS))).tokens[:ROWS].tolist())


@pytest.mark.parametrize("static_shapes", [False, True])
def test_draws_come_from_k_tokens_or_from_all_tied_tokens(static_shapes: bool) -> None:
    kept = _drawn(CPU, keeps=True, static_shapes=static_shapes)
    cut = _drawn(CPU, keeps=False, static_shapes=static_shapes)

    assert kept == set(TIED)
    assert len(cut) == 3 and cut < kept


def test_an_emulated_card_draws_from_k_tokens() -> None:
    choice = ModeChoice(HPU_GRAPHS, "the test's")
    with torch.inference_mode(), emulated(lazy=True, strict=True):
        backend = GaudiBackend(ExecutionConfig(), choice)
        cut = _drawn(backend, keeps=False, static_shapes=True)
        backend.close()

    assert len(cut) == 3 and cut < set(TIED)


def test_keep_ties_returns_its_input_if_all_weights_are_kept() -> None:
    weights = torch.ones(1, 4)

    assert keep_ties(weights, torch.ones(1, 1), 4) is weights
