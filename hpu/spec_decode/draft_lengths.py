"""DraftLengths: how many drafts of each request a launch verifies.

A draft costs one more row of the launch and brings a token if it and all drafts before it are
accepted. So the number of drafts that gives the most tokens a second depends on how likely they
are, and on what a row costs beside the rows that are there.
"""

from collections.abc import Sequence

from hpu.spec_decode.base import DraftingCosts, Proposal
from hpu.spec_decode.launch_costs import LaunchCosts

NUM_LEVELS = 7
"""Levels of confidence: 0, 1, 2-3, 4-7, 8-15, 16-31, 32 and more tokens that agreed."""
DECAY = 0.9
"""Weight of older drafts in an acceptance rate, a draft."""
FIRST_RATES = (0.5, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9)
"""Acceptance of drafts of each level before any was verified."""
FIRST_WEIGHT = 2.0
"""Drafts that the first rate counts for."""
SHARED_DECAY = 0.98
MIN_PAUSE, MAX_PAUSE = 16, 256
"""Launches without drafts after which a request whose drafts were not worth their rows tries one
again; doubled each time."""
MIN_GAIN = 1.01
"""By what factor more tokens a second are expected for the drafts to be verified: the estimates of
cost and acceptance are not exact."""


TRY_SHARE = 0.005
"""Share of the time that tries may take."""
LEAST_TRY = 0.2
"""What the first try of a launch counts for at least, of the time of the launch: so much a row more
may take (a tile of a matrix unit), whatever was measured. A disturbed measurement would make tries
free, and each launch would have some (0.83 of the tokens a second without drafts)."""
MAX_SAVED = 200
"""Launches whose share may be saved."""
MAX_STEADY_ROWS = 8
"""Rows of a request in a drafter's first launch up to which they count whole: so many come with
each launch. More are a prompt that the drafter has not computed."""
CATCH_UP_LAUNCHES = 32
"""Launches that the cost of such a prompt is divided among."""


class AcceptanceRates:
    """How often drafts of each level of confidence were accepted, of those whose predecessors
    were; older ones count less."""

    def __init__(self, rates: Sequence[float], weight: float, decay: float) -> None:
        self._decay = decay
        self._accepted = [weight * rate for rate in rates]
        self._total = [weight] * len(rates)

    def __getitem__(self, level: int) -> float:
        return self._accepted[level] / self._total[level]

    def add(self, level: int, is_accepted: bool) -> None:
        """A draft was verified."""
        self._accepted[level] = self._accepted[level] * self._decay + is_accepted
        self._total[level] = self._total[level] * self._decay + 1


class _State:
    """One request."""

    __slots__ = ("is_trying", "levels", "pause", "rates", "wait")

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = AcceptanceRates(rates, FIRST_WEIGHT, DECAY)
        self.pause = MIN_PAUSE
        self.wait = 0
        """Launches until the next try; 0 while drafts are worth their rows."""
        self.is_trying = False
        self.levels: list[int] = []
        """Of the drafts that are being verified."""


class DraftLengths:
    """Statistics of the live requests, and the choice of drafts for a launch. A new request starts
    with the rates of all requests before it. All ranks that see the same tokens choose the same.
    `costs` None: all drafts are verified."""

    def __init__(self, max_drafts: int, costs: LaunchCosts | None) -> None:
        self._max_drafts = max_drafts
        self.costs = costs
        self.drafting: DraftingCosts | None = None
        """What drafting costs, if that counts."""
        self._shared = AcceptanceRates(FIRST_RATES, FIRST_WEIGHT, SHARED_DECAY)
        self._states: dict[int, _State] = {}
        self._saved_s = 0.0
        """Time that tries may take."""
        self._has_try = False
        """Whether the launch has one."""

    def begin_launch(self, num_requests: int) -> None:
        """Called once for each launch, before `wanted`."""
        self._has_try = False
        if self.costs is not None:
            share = TRY_SHARE * self.costs.seconds(num_requests)
            self._saved_s = min(self._saved_s + share, MAX_SAVED * share)

    def add_request(self, req_index: int) -> None:
        """A request starts."""
        self._states[req_index] = _State([self._shared[level] for level in range(NUM_LEVELS)])

    def remove_request(self, req_index: int) -> None:
        """A request ends."""
        self._states.pop(req_index, None)

    def wanted(self, req_index: int) -> int:
        """How many drafts are proposed for the request in this launch: 0 while it pauses, 1 when
        it tries again."""
        state = self._states[req_index]
        if self.costs is None or state.wait == 0:
            return 1 if state.is_trying else self._max_drafts
        state.wait -= 1
        state.is_trying = state.wait == 0
        return int(state.is_trying)

    def plan(
        self,
        num_requests: int,
        req_indices: Sequence[int],
        limits: Sequence[int],
        num_tokens: Sequence[int],
    ) -> list[int]:
        """How many drafts are proposed for each of `req_indices`, at most `limits`, by what
        proposing and verifying them costs in a launch of `num_requests`. `num_tokens`: known tokens
        of each."""
        costs, drafting = self.costs, self.drafting
        planned = list(limits)
        if costs is None or drafting is None:
            return planned
        states = [self._states[req_index] for req_index in req_indices]
        pending = list(map(drafting.num_pending, req_indices, num_tokens))
        gains = []
        for i, state in enumerate(states):
            gain = 1.0
            for position in range(0 if state.is_trying else limits[i]):
                gain *= state.rates[_level(position)]
                gains.append((-gain, position, i))
        gains.sort()
        planned = [0] * len(states)
        for _, _, i in gains[: _num_worth_drafting(gains, num_requests, pending, costs, drafting)]:
            planned[i] += 1
        for i, state in enumerate(states):
            if not state.is_trying:
                if not planned[i]:
                    state.wait = state.pause
                continue
            verified_s = self._try_s(1, num_requests + sum(planned), num_requests)
            drafted_s = drafting.launches.seconds(pending[i])
            if verified_s + drafted_s <= self._saved_s:
                self._saved_s -= drafted_s
                planned[i] = 1
        return planned

    def choose(self, req_indices: Sequence[int], proposals: Sequence[Proposal]) -> list[int]:
        """How many of the proposed drafts of each request a launch verifies."""
        chosen = [len(proposal.tokens) for proposal in proposals]
        if not any(chosen):
            return chosen
        states = [self._states[req_index] for req_index in req_indices]
        gains = []
        for i, (state, proposal) in enumerate(zip(states, proposals, strict=True)):
            state.levels = [_level(proposal.confidence + position) for position in range(chosen[i])]
            gain = 1.0
            for level in state.levels:
                gain *= state.rates[level]
                gains.append((-gain, i))
        if self.costs is None:
            return chosen
        # The likeliest first; those of one request stay in order.
        gains.sort()
        num_worth = _num_worth(gains, len(req_indices), self.costs)
        proposed, chosen = chosen, [0] * len(chosen)
        for _, i in gains[:num_worth]:
            chosen[i] += 1
        for i, state in enumerate(states):
            if state.is_trying:
                chosen[i] = proposed[i] if self._may_try(proposed[i], sum(chosen), states) else 0
            elif proposed[i] and not chosen[i]:
                state.wait = state.pause
        return chosen

    def _may_try(self, count: int, num_chosen: int, states: Sequence[_State]) -> bool:
        """Whether the time for `count` drafts more is saved, which is then taken."""
        needed = self._try_s(count, len(states) + num_chosen, len(states))
        if not count or needed > self._saved_s:
            return False
        self._saved_s -= needed
        self._has_try = True
        return True

    def _try_s(self, count: int, rows: int, num_requests: int) -> float:
        """What `count` drafts that are tried take, beside the `rows` of a launch."""
        assert self.costs is not None
        needed = self.costs.seconds(rows + count) - self.costs.seconds(rows)
        if self._has_try:
            return needed
        return max(needed, LEAST_TRY * self.costs.seconds(num_requests))

    def verified(self, req_index: int, num_drafts: int, num_accepted: int) -> None:
        """A launch verified `num_drafts` of the request, and accepted the first `num_accepted`."""
        state = self._states[req_index]
        for position, level in enumerate(state.levels[: min(num_accepted + 1, num_drafts)]):
            state.rates.add(level, position < num_accepted)
            self._shared.add(level, position < num_accepted)
        if state.is_trying:
            state.is_trying = False
            if num_accepted:
                self._states[req_index] = _State(FIRST_RATES)
            else:
                state.pause = min(2 * state.pause, MAX_PAUSE)
                state.wait = state.pause


def _level(num_agreed: int) -> int:
    """The level of a draft with so many tokens before it that agreed."""
    return min(num_agreed.bit_length(), NUM_LEVELS - 1)


def _num_worth_drafting(
    gains: Sequence[tuple[float, int, int]],
    num_requests: int,
    pending: Sequence[int],
    costs: LaunchCosts,
    drafting: DraftingCosts,
) -> int:
    """As `_num_worth`, of drafts (-gain, position, index into `pending`) that a drafter computes
    position by position: a launch for each."""
    tokens, drafted_s = float(num_requests), 0.0
    fastest = MIN_GAIN * tokens / costs.seconds(num_requests)
    num_worth = 0
    launch_rows: dict[int, int] = {}
    for number, (gain, position, i) in enumerate(gains, 1):
        rows = 1
        if position == 0:
            rows = pending[i]
            if rows > MAX_STEADY_ROWS:
                rows = 1 + rows // CATCH_UP_LAUNCHES
        before = launch_rows.get(position, 0)
        launch_rows[position] = before + rows
        drafted_s += drafting.launches.seconds(before + rows)
        drafted_s -= drafting.launches.seconds(before) if before else 0.0
        tokens -= gain
        speed = tokens / (costs.seconds(num_requests + number) + drafted_s)
        if speed > fastest:
            fastest, num_worth = speed, number
    return num_worth


def _num_worth(gains: Sequence[tuple[float, int]], num_requests: int, costs: LaunchCosts) -> int:
    """How many of the drafts, the likeliest first, give the most tokens a second."""
    tokens = float(num_requests)
    fastest = MIN_GAIN * tokens / costs.seconds(num_requests)
    num_worth = 0
    for number, (gain, _) in enumerate(gains, 1):
        tokens -= gain
        speed = tokens / costs.seconds(num_requests + number)
        if speed > fastest:
            fastest, num_worth = speed, number
    return num_worth
