"""DraftLengths: chooses how many drafts of each request a launch verifies.

A draft costs an additional row of the launch, and yields a token only if it and all drafts before
it are accepted. The best number of drafts therefore depends on the acceptance rates and on the cost
of an additional row.
"""

from collections.abc import Sequence

from hpu.spec_decode.base import DraftingCosts, Proposal
from hpu.spec_decode.launch_costs import LaunchCosts

NUM_LEVELS = 7
"""Number of levels of match length (Proposal.confidence): 0, 1, 2-3, 4-7, 8-15, 16-31, and 32 or
more matching tokens."""
DECAY = 0.9
"""Factor by which each new draft reduces the weight of older drafts in an acceptance rate."""
FIRST_RATES = (0.5, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9)
"""Initial acceptance rate of each level."""
FIRST_WEIGHT = 2.0
"""Weight of the initial rate, in drafts."""
SHARED_DECAY = 0.98
MIN_PAUSE, MAX_PAUSE = 16, 256
"""Minimum and maximum pause, in launches without drafts, of a request whose drafts did not pay off.
After the pause, the request tries a draft again. Each failed trial doubles the pause."""
MIN_GAIN = 1.01
"""Minimum expected speedup in tokens per second for verifying drafts; covers errors in the cost and
acceptance estimates."""


TRY_SHARE = 0.005
"""Maximum share of the time that trials take."""
LEAST_TRY = 0.2
"""Minimum assumed cost of the first trial in a launch, as a share of the launch time. One more row
may cost this much (a tile of a matrix unit) even if less was measured. A disturbed measurement
would otherwise make trials free and add trials to every launch, which gave 0.83 times the tokens
per second without drafts."""
MAX_SAVED = 200
"""Maximum saved time for trials, in launches whose TRY_SHARE is saved."""
MAX_STEADY_ROWS = 8
"""Maximum rows of a request in a drafter's first launch that are charged in full, because each
launch repeats them. A request with more rows has a prompt that the drafter has not computed; its
cost is spread over CATCH_UP_LAUNCHES."""
CATCH_UP_LAUNCHES = 32
"""Number of launches over which the cost of computing a prompt is spread."""


class AcceptanceRates:
    """Acceptance rate of drafts by level, among drafts whose predecessors were accepted. Older
    drafts have less weight."""

    def __init__(self, rates: Sequence[float], weight: float, decay: float) -> None:
        self._decay = decay
        self._accepted = [weight * rate for rate in rates]
        self._total = [weight] * len(rates)

    def __getitem__(self, level: int) -> float:
        return self._accepted[level] / self._total[level]

    def add(self, level: int, is_accepted: bool) -> None:
        """Record the outcome of a verified draft."""
        self._accepted[level] = self._accepted[level] * self._decay + is_accepted
        self._total[level] = self._total[level] * self._decay + 1


class _State:
    """Draft statistics of a request."""

    __slots__ = ("is_trying", "levels", "pause", "rates", "wait")

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = AcceptanceRates(rates, FIRST_WEIGHT, DECAY)
        self.pause = MIN_PAUSE
        self.wait = 0
        """Number of launches until the next trial; 0 while drafts pay off."""
        self.is_trying = False
        self.levels: list[int] = []
        """Levels of the drafts in the current launch."""


class DraftLengths:
    """Chooses the number of drafts per request and launch from statistics of the running requests.
    A new request starts with the rates of all earlier requests. All ranks that see the same tokens
    choose the same numbers."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self.costs: LaunchCosts | None = None
        """Cost of decodes; None: all drafts are verified."""
        self.drafting: DraftingCosts | None = None
        """Cost of drafting; None: drafting is free."""
        self._shared = AcceptanceRates(FIRST_RATES, FIRST_WEIGHT, SHARED_DECAY)
        self._states: dict[int, _State] = {}
        self._saved_s = 0.0
        """Time saved for trials, in seconds."""
        self._has_try = False
        """Whether the current launch has a trial."""

    def begin_launch(self, num_requests: int) -> None:
        """Start a launch of `num_requests`, which adds to the time saved for trials. Call it before
        `wanted`."""
        self._has_try = False
        if self.costs is not None:
            share = TRY_SHARE * self.costs.seconds(num_requests)
            self._saved_s = min(self._saved_s + share, MAX_SAVED * share)

    def add_request(self, req_index: int) -> None:
        """Register a request that starts."""
        self._states[req_index] = _State([self._shared[level] for level in range(NUM_LEVELS)])

    def remove_request(self, req_index: int) -> None:
        """Remove a request that has ended."""
        self._states.pop(req_index, None)

    def wanted(self, req_index: int) -> int:
        """Maximum number of drafts to propose for the request in this launch: 0 during a pause, 1
        for a trial. Call it once per launch, because it shortens the pause."""
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
        """Number of drafts to propose for each of `req_indices`, at most `limits`, given the cost
        of drafting and verifying in a launch of `num_requests`. `num_tokens`: number of known
        tokens of each request."""
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
        """Number of proposed drafts of each request that the launch verifies."""
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
        # Most likely drafts first; the drafts of a request stay in order.
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
        """Spend saved time on `count` more drafts; returns False if not enough time is saved, or if
        `count` is 0."""
        needed = self._try_s(count, len(states) + num_chosen, len(states))
        if not count or needed > self._saved_s:
            return False
        self._saved_s -= needed
        self._has_try = True
        return True

    def _try_s(self, count: int, rows: int, num_requests: int) -> float:
        """Seconds that `count` trial drafts add to a launch of `rows` rows; for the first trial
        of a launch at least LEAST_TRY of the launch without drafts."""
        assert self.costs is not None
        needed = self.costs.seconds(rows + count) - self.costs.seconds(rows)
        if self._has_try:
            return needed
        return max(needed, LEAST_TRY * self.costs.seconds(num_requests))

    def verified(self, req_index: int, num_drafts: int, num_accepted: int) -> None:
        """Record that a launch verified `num_drafts` drafts of the request and accepted the first
        `num_accepted`."""
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
    return min(num_agreed.bit_length(), NUM_LEVELS - 1)


def _num_worth_drafting(
    gains: Sequence[tuple[float, int, int]],
    num_requests: int,
    pending: Sequence[int],
    costs: LaunchCosts,
    drafting: DraftingCosts,
) -> int:
    """Same as `_num_worth` for a drafter that runs one launch per draft position; `gains`: (-gain,
    position, index into `pending`) of each draft."""
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
    """Number of drafts that maximizes tokens per second. `gains`: (-gain, request) of each draft,
    most likely first."""
    tokens = float(num_requests)
    fastest = MIN_GAIN * tokens / costs.seconds(num_requests)
    num_worth = 0
    for number, (gain, _) in enumerate(gains, 1):
        tokens -= gain
        speed = tokens / costs.seconds(num_requests + number)
        if speed > fastest:
            fastest, num_worth = speed, number
    return num_worth
