"""Bitmasks for the tokens after drafts of a request with a grammar."""

from pathlib import Path

import numpy as np
import pytest
from tiny_models import EOS, VOCAB_SIZE, write_tokenizer
from tokenizers import Tokenizer

from config.params.sampling import SamplingParams
from config.params.structured_output import GrammarSpec
from engine.request import ModelLimits, Request
from engine.scheduling.grammar_masks import add_masks
from engine.structured_output.grammar import Grammar, Vocabulary
from engine.structured_output.token_bitmask import Bitmask, tokens_in
from engine.transport.messages import AddRequest
from hpu.protocol import StepPlan

LIMITS = ModelLimits(100, VOCAB_SIZE, frozenset([EOS]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def ids(folder: Path) -> dict[str, int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {text: tokenizer.encode(text).ids[0] for text in "abcx"}


def new_request(folder: Path, req_index: int, form: str) -> Request:
    spec = GrammarSpec("regex", form)
    grammar = Grammar(spec, Vocabulary(str(folder), VOCAB_SIZE, LIMITS.eos_ids))
    prompt = memoryview(np.array([5], "<u4").tobytes())
    request = Request(
        AddRequest(req_index, prompt, SamplingParams(structured_outputs=spec)),
        [],
        seed=0,
        priority_key=(0, req_index),
        limits=LIMITS,
        arrived_at=0.0,
        grammar=grammar,
    )
    request.req_index = req_index
    return request


def masks_of(requests: list[Request]) -> list[list[set[int]]]:
    """Tokens that each bitmask allows, by request."""
    plan = StepPlan(0, [])
    assert add_masks(plan, requests) == []
    words: Bitmask = np.frombuffer(plan.masks, "<u4")
    counts = plan.mask_counts or [1] * len(requests)
    rows = iter(words.reshape(sum(counts), -1))
    return [[set(tokens_in(next(rows)).tolist()) for _ in range(count)] for count in counts]


def test_each_allowed_draft_is_followed_by_a_bitmask(folder: Path, ids: dict[str, int]) -> None:
    a, b, c, x = (ids[text] for text in "abcx")
    requests = [new_request(folder, index, form) for index, form in enumerate(["abc", "(a|b)+"])]
    requests[0].drafts = [a, b, x, c]
    requests[1].drafts = []

    (first, then), (other,) = masks_of(requests)[0][:2], masks_of(requests)[1]

    assert (a in first, b in first) == (True, False)
    assert (a in then, b in then) == (False, True)
    assert len(masks_of(requests)[0]) == 3
    assert {a, b} <= other
    # The state of the request itself has not advanced.
    assert masks_of(requests)[0][0] == first


def test_no_bitmask_is_made_after_a_draft_that_ends_the_output(
    folder: Path, ids: dict[str, int]
) -> None:
    request = new_request(folder, 0, "ac")
    request.drafts = [ids["a"], ids["c"], EOS, EOS]

    (masks,) = masks_of([request])

    assert len(masks) == 3
    assert masks[2] == {EOS}


def test_without_drafts_a_plan_has_no_counts(folder: Path) -> None:
    plan = StepPlan(0, [])
    add_masks(plan, [new_request(folder, 0, "abc")])

    assert plan.mask_counts == []
    assert plan.masked_requests == [0]
