"""Selects the proposer of a speculation method."""

from collections.abc import Callable, Mapping

from config.params.speculation import (
    DRAFT_MODEL,
    EAGLE,
    EAGLE3,
    MEDUSA,
    MLP_SPECULATOR,
    MTP,
    NGRAM,
    SUFFIX,
    SpeculationMethod,
)
from hpu.spec_decode.base import Proposer
from hpu.spec_decode.draft_model import DraftLauncher, DraftModelProposer
from hpu.spec_decode.hidden_heads import HeadLauncher, HiddenHeadProposer
from hpu.spec_decode.ngram import NgramProposer
from hpu.spec_decode.suffix import SuffixProposer


def _ngram(method: SpeculationMethod, launcher: object) -> Proposer:
    return NgramProposer(method.lookup_max, method.lookup_min)


def _suffix(method: SpeculationMethod, launcher: object) -> Proposer:
    return SuffixProposer(**method.suffix._asdict())


def _draft_model(method: SpeculationMethod, launcher: object) -> Proposer:
    assert isinstance(launcher, DraftLauncher), "the draft model is loaded"
    return DraftModelProposer(launcher)


def _draft_head(method: SpeculationMethod, launcher: object) -> Proposer:
    assert isinstance(launcher, DraftLauncher), "the head is loaded"
    return DraftModelProposer(launcher, reads_hidden=True)


def _hidden_head(method: SpeculationMethod, launcher: object) -> Proposer:
    assert isinstance(launcher, HeadLauncher), "the head is loaded"
    return HiddenHeadProposer(launcher)


PROPOSERS: Mapping[str, Callable[[SpeculationMethod, object], Proposer]] = {
    NGRAM: _ngram,
    SUFFIX: _suffix,
    DRAFT_MODEL: _draft_model,
    **dict.fromkeys((EAGLE, EAGLE3, MTP), _draft_head),
    **dict.fromkeys((MEDUSA, MLP_SPECULATOR), _hidden_head),
}


def select_proposer(method: SpeculationMethod, launcher: object = None) -> Proposer:
    """Proposer for `method`. `launcher`: runs the method's draft model or head, if any."""
    return PROPOSERS[method.method](method, launcher)
