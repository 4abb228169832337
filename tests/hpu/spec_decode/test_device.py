"""Drafts by tensor operations equal the drafts of the host's n-gram search."""

import random

import numpy as np
import pytest
import torch

from config.speculation.ngram import NgramLimits
from hpu.spec_decode.drafters.ngram import lookup, lookup_on_device

LENGTH = 40


@pytest.mark.parametrize("shortest", [1, 2])
@pytest.mark.parametrize("vocab_size", [2, 4])
def test_device_drafts_equal_host_drafts(shortest: int, vocab_size: int) -> None:
    rng = random.Random(5)
    limits = NgramLimits(3, shortest)
    histories = [
        [rng.randrange(vocab_size) for _ in range(rng.randint(1, LENGTH))] for _ in range(200)
    ]
    known = torch.zeros(len(histories), LENGTH, dtype=torch.int32)
    for row, history in zip(known, histories, strict=True):
        row[: len(history)] = torch.tensor(history)
        # Tokens after the known tokens belong to another request.
        row[len(history) :] = rng.randrange(vocab_size)
    last = torch.tensor([len(history) - 1 for history in histories], dtype=torch.int32)

    drafts, is_found = lookup_on_device(known, last, limits, max_drafts=5)

    for history, found, is_any in zip(histories, drafts.tolist(), is_found.tolist(), strict=True):
        expected = lookup(np.array(history, np.uint32), 3, shortest, 5).tokens
        assert (found if is_any else []) == expected
