"""Draft methods: facts in config/speculation/, drafters in hpu/spec_decode/drafters/."""

import json

import numpy as np
import pytest
import torch

from config.errors import ConfigError
from config.kinds import modules_of
from config.params.speculation import SpeculationConfig
from config.speculation.base import DRAFT_METHODS, SpeculationMethod
from hpu.backends.cpu import CpuBackend
from hpu.spec_decode.drafter import Drafter, ModelDrafter, select_drafter, select_proposer

SEARCHING = [name for name, facts in DRAFT_METHODS.all.items() if not facts.has_drafter]
"""Methods that need no checkpoint."""
LENGTH, LIMIT = 48, 3
REPEATED = [5, 6, 7, 8] * 6


def method_of(name: str) -> SpeculationMethod:
    settings = {"method": name, "num_speculative_tokens": LIMIT}
    found = SpeculationConfig(speculative_config=json.dumps(settings)).choose()
    assert found is not None
    return found


@pytest.mark.parametrize("name", DRAFT_METHODS.all)
def test_the_drafter_of_each_method_is_in_the_file_of_the_same_name(name: str) -> None:
    drafter = select_drafter(SpeculationMethod(name, LIMIT))

    assert isinstance(drafter, ModelDrafter) == DRAFT_METHODS[name].has_drafter


def test_each_drafter_has_facts_in_the_file_of_the_same_name() -> None:
    drafters = {name.rpartition(".")[2] for name in modules_of("hpu.spec_decode.drafters")}
    facts = {name.rpartition(".")[2] for name in modules_of("config.speculation")}

    assert drafters
    assert drafters - facts == set()


@pytest.mark.parametrize("name", SEARCHING)
def test_a_method_without_a_checkpoint_continues_repeated_text_up_to_the_limit(name: str) -> None:
    proposer = select_proposer(method_of(name))
    history = np.array(REPEATED, np.uint32)
    proposer.add_request(0, history)
    proposer.add_request(1, history[:1])

    found = proposer.propose([0, 1, 0], [history, history[:1], history], [LIMIT, LIMIT, 1])

    assert [proposal.tokens for proposal in found] == [REPEATED[:LIMIT], [], REPEATED[:1]]


@pytest.mark.parametrize("name", SEARCHING)
def test_a_method_without_a_checkpoint_drafts_the_same_tokens_on_a_device(name: str) -> None:
    drafter, method = select_drafter(method_of(name)), method_of(name)
    if type(drafter).search is Drafter.search:
        pytest.skip(f"{name} drafts on the host only")
    search = drafter.search(method, CpuBackend(1), max_num_reqs=1, max_model_len=LENGTH)
    known = torch.zeros(1, LENGTH, dtype=torch.int64)
    known[0, : len(REPEATED)] = torch.tensor(REPEATED)

    drafts, counts = search(
        known, torch.tensor([len(REPEATED) - 1]), torch.tensor([0]), *search.tensors
    )

    assert drafts[0, : int(counts[0])].tolist() == REPEATED[:LIMIT]


def test_a_method_that_drafts_on_the_host_only_is_refused_on_a_device() -> None:
    method = SpeculationMethod("ngram", LIMIT)

    with pytest.raises(ConfigError, match="the method ngram, which drafts on cpu only"):
        Drafter().search(method, CpuBackend(1), max_num_reqs=1, max_model_len=LENGTH)
