"""Drafts from the text of a request and from earlier outputs."""

import numpy as np

from config.speculation.suffix import SuffixLimits
from hpu.spec_decode.base import Tokens
from hpu.spec_decode.drafters.suffix import SEPARATOR, Outputs, SuffixProposer


def make(
    max_depth: int = 24, max_cached: int = 10, factor: float = 1.0, least: float = 0.1
) -> SuffixProposer:
    return SuffixProposer(SuffixLimits(max_depth, max_cached, factor, least))


def make_with(text: Tokens, max_depth: int = 24, factor: float = 1.0) -> SuffixProposer:
    proposer = make(max_depth, factor=factor)
    proposer.add_request(0, text)
    return proposer


def tokens(*numbers: int) -> Tokens:
    return np.array(numbers, np.uint32)


def draft(proposer: SuffixProposer, history: Tokens, limit: int = 9, index: int = 0) -> list[int]:
    (found,) = proposer.propose([index], [history], [limit])
    return found.tokens


def test_the_continuation_within_the_request_is_drafted() -> None:
    text = tokens(1, 2, 3, 4, 5, 6, 1, 2)

    assert draft(make_with(text, factor=2.0), text) == [3, 4, 5, 6]
    assert draft(make_with(text, factor=2.0), text, limit=2) == [3, 4]
    assert draft(make_with(text), text) == [3, 4]
    assert draft(make_with(text, max_depth=5, factor=2.0), text) == [3, 4, 5]


def test_new_tokens_are_indexed() -> None:
    proposer = make()
    proposer.add_request(0, tokens(1, 2))

    assert draft(proposer, tokens(1, 2)) == []
    assert draft(proposer, tokens(1, 2, 7, 1, 2)) == [7, 1]


def test_outputs_of_private_requests_are_not_drafted_for_other_requests() -> None:
    proposer = make()
    proposer.add_request(0, tokens(10), is_private=True)
    draft(proposer, tokens(10, 11, 12))
    proposer.remove_request(0)
    proposer.add_request(0, tokens(20))
    draft(proposer, tokens(20, 21, 22))
    proposer.remove_request(0)

    proposer.add_request(0, tokens(5, 10))
    proposer.add_request(1, tokens(5, 20))

    assert draft(proposer, tokens(5, 10)) == []
    assert draft(proposer, tokens(5, 20), index=1)[:1] == [21]


def test_outputs_of_earlier_requests_are_drafted_and_the_oldest_are_dropped() -> None:
    proposer = make(max_cached=1)
    for first in (10, 20):
        proposer.add_request(0, tokens(first))
        draft(proposer, tokens(first, first + 1, first + 2))
        proposer.remove_request(0)

    proposer.add_request(0, tokens(5, 20))
    proposer.add_request(1, tokens(5, 10))

    assert draft(proposer, tokens(5, 20)) == [21]
    assert draft(proposer, tokens(5, 10), index=1) == []


def test_prompts_of_earlier_requests_are_not_drafted() -> None:
    proposer = make()
    proposer.add_request(0, tokens(*range(30, 50)))
    proposer.remove_request(0)
    proposer.add_request(0, tokens(30))

    assert draft(proposer, tokens(30)) == []


def test_the_most_likely_continuation_is_followed_while_it_is_likely() -> None:
    text = tokens(1, 2, 9, 1, 2, 8, 1, 2, 9, 4, 1, 2)
    unsure = make(factor=2.0, least=0.5)
    unsure.add_request(0, text)

    # 9 follows in 2 of 3 cases, and then 1 in 1 of 2.
    assert draft(make_with(text, factor=2.0), text)[:2] == [9, 1]
    assert draft(unsure, text) == [9]


def test_the_oldest_outputs_are_dropped_when_there_are_too_many_tokens() -> None:
    outputs = Outputs(max_requests=100, max_tokens=20)

    for start in range(0, 1000, 10):
        outputs.add(tokens(*range(start, start + 5)))

    found = [token for token in outputs.tokens.tolist() if token != SEPARATOR]
    assert found == [*range(970, 975), *range(980, 985), *range(990, 995)]


def test_drafts_do_not_continue_into_the_next_output() -> None:
    proposer = make()
    for first in (10, 20):
        proposer.add_request(0, tokens(first))
        draft(proposer, tokens(first, first + 1, first + 2))
        proposer.remove_request(0)
    proposer.add_request(0, tokens(3, 10, 11))

    assert draft(proposer, tokens(3, 10, 11)) == [12]
