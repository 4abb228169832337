"""The proposer of a method."""

from config.params.speculation import NGRAM, SpeculationMethod
from hpu.spec_decode.base import Proposer
from hpu.spec_decode.ngram import NgramProposer


def select_proposer(method: SpeculationMethod) -> Proposer:
    """The proposer that `method` names."""
    assert method.method == NGRAM, f"{method.method} was refused"
    return NgramProposer(method.lookup_max, method.lookup_min)
