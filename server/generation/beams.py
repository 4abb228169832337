"""Beam search over one prompt: which beams live on, which have ended, and which are the best.

Knows no engine, no texts and no clock. The rules are those of `generate(num_beams=...)` of
transformers, so that both find the same sequences with the same scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from server.generation.outputs import PositionLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """One way to go on from the prompt."""

    tokens: list[int] = field(default_factory=list)
    positions: list[PositionLogprobs] = field(default_factory=list)
    """One a token, which is the chosen one there."""
    logprob: float = 0.0
    """Sum over its tokens."""
    ends: bool = False
    """Whether its last token is an end token."""

    def score(self, length_penalty: float) -> float:
        """What ended beams are compared by: the sum over length ** penalty, end token included."""
        return float(self.logprob / len(self.tokens) ** length_penalty)


class BeamSearch:
    """At most `width` beams, grown by one token at a time until nothing better can come.

    Of the best `width` continuations those with an end token have ended; the best `width` without
    one live on. The search is over once as many have ended and the best that lives on, ended at its
    present length, would not beat the worst of them; or with token `limit`, where everything ends.
    """

    def __init__(
        self, width: int, limit: int, end_ids: frozenset[int], length_penalty: float
    ) -> None:
        self.running = [Beam()]
        self.ended: list[Beam] = []
        """The best so far, best first; `width` of them once nothing is running."""
        self._width = width
        self._limit = limit
        self._end_ids = end_ids
        self._penalty = length_penalty

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest tokens each running beam has to show: all but the end tokens
        among them could be the ones that live on."""
        return self._width + len(self._end_ids)

    def grow(self, nexts: Sequence[PositionLogprobs]) -> None:
        """One token more: `nexts` says for each running beam what may follow, likeliest first."""
        found = [
            (beam.logprob + token.logprob, beam, token, position.top)
            for beam, position in zip(self.running, nexts, strict=True)
            for token in position.top[: self.num_candidates]
        ]
        found.sort(key=lambda one: -one[0])
        grown = [
            Beam(
                [*beam.tokens, token.token_id],
                [*beam.positions, PositionLogprobs(token, top)],
                logprob,
                token.token_id in self._end_ids,
            )
            for logprob, beam, token, top in found[: self._width * (1 + len(self._end_ids))]
        ]
        is_last = len(grown[0].tokens) == self._limit
        self._end([beam for beam in grown[: self._width] if is_last or beam.ends])
        self.running = [beam for beam in grown if not beam.ends][: self._width]
        if is_last or self._is_settled:
            self.running = []

    def _end(self, beams: list[Beam]) -> None:
        both = sorted([*self.ended, *beams], key=lambda beam: -beam.score(self._penalty))
        self.ended = both[: self._width]

    @property
    def _is_settled(self) -> bool:
        if len(self.ended) < self._width:
            return False
        best = self.running[0].score(self._penalty)
        return best <= self.ended[-1].score(self._penalty)
