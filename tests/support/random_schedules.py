"""Random schedules of requests, steps, aborts and resets, and the checks after them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core_rig import CoreRig, CoreSettings
from hypothesis import settings
from hypothesis import strategies as st

from config.params.structured_output import GrammarSpec
from engine.structured_output.grammar import Grammar

VOCABULARY = 50
PROFILE = settings(derandomize=True, deadline=None, database=None, print_blob=False)

# Prompt beginnings of many requests, so that prefixes are shared and some differ late.
TALKS = [
    [(7 * index + index * index * talk + talk) % VOCABULARY for index in range(60)]
    for talk in range(3)
]
TALKS.append([*TALKS[0][:9], *TALKS[1][9:]])

FORMS = [
    GrammarSpec("regex", "[a-c]{2,9};[0-9]{2}"),
    GrammarSpec("json", '{"type":"array","items":{"type":"integer"}}'),
]


@dataclass(frozen=True)
class Ask:
    """A request of a schedule."""

    prompt: tuple[int, ...]
    salt: str
    priority: int
    front_end: int
    sampling: dict[str, Any]
    form: int | None = None
    """Index into FORMS; None: the request has no grammar."""


Move = Ask | int | str
"""A request to add; a number of steps to run; a negative number: a request to abort, counted from
the newest; or "reset"."""


def random_ask(rng: random.Random) -> Ask:
    prompt = rng.choice(TALKS)[: rng.choice([rng.randint(1, 45), rng.randint(1, 16)])]
    prompt = [*prompt, *(rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 0, 0, 2, 5])))]
    sampling: dict[str, Any] = {"seed": 7, "max_tokens": rng.choice([1, 2, 15, 30, 40, None])}
    options: dict[str, list[Any]] = {
        "temperature": [0.0, 1.0],
        "ignore_eos": [False, True, True],
        "stop_token_ids": [(), (), (), (3,), (2, 4, 6, 8), tuple(range(10, 20))],
        "min_tokens": [0, 0, 1],
        "logprobs": [None, None, 0, 2],
        "prompt_logprobs": [None, None, None, 0, 1],
    }
    sampling.update({name: rng.choice(values) for name, values in options.items()})
    return Ask(
        tuple(prompt),
        rng.choice(["", "", "", "salt"]),
        rng.randint(-1, 1),
        rng.randint(0, 1),
        sampling,
        rng.choice([None, *range(len(FORMS))]),
    )


def random_move(rng: random.Random) -> Move:
    """Mostly requests and steps; sometimes an abort or a cache reset."""
    kind = rng.random()
    if kind < 0.5:
        return random_ask(rng)
    if kind < 0.85:
        return rng.choice([1, 1, 2, 3, 5, 12])
    if kind < 0.98:
        return -rng.choice([1, 2, 3, 6, 10])
    return "reset"


rigs = st.builds(
    CoreSettings,
    num_blocks=st.sampled_from([16, 17, 18, 22, 30, 60]),
    max_num_seqs=st.sampled_from([9, 5, 2, 1]),
    budget=st.sampled_from([9, 16, 40, 200]),
    depth=st.integers(1, 2),
    policy=st.sampled_from(["fcfs", "priority"]),
    prefix_caching=st.sampled_from([True, True, True, False]),
    buckets=st.sampled_from(["exact", "exponential", "linear"]),
    max_prefill_batch=st.sampled_from([1, 3]),
    prefill_launch_tokens=st.sampled_from([0, 0, 6, 20]),
    num_scheduler_steps=st.sampled_from([1, 1, 2, 3, 8]),
)


schedules = st.tuples(st.integers(0, 2**32 - 1), st.integers(20, 90)).map(
    lambda drawn: [random_move(rng) for rng in [random.Random(drawn[0])] for _ in range(drawn[1])]
)


class Schedule:
    """Makes the moves, and checks which requests cached prefixes came from."""

    def __init__(self, rig: CoreRig, grammars: list[Grammar]) -> None:
        self.rig = rig
        self._grammars = grammars
        self.keys: list[int] = []
        self.asks: dict[int, Ask] = {}

    def make(self, move: Move) -> None:
        if isinstance(move, Ask):
            key = (move.front_end << 48) | len(self.keys)
            self.keys.append(key)
            self.asks[key] = move
            rules = {} if move.form is None else self._rules(move.form)
            place: dict[str, Any] = {"priority": move.priority, "salt": move.salt}
            self.rig.add(key, move.prompt, **place, **move.sampling, **rules)
        elif move == "reset":
            self.rig.core.control("reset_prefix_cache", {})
        elif isinstance(move, int) and move < 0:
            if self.keys and -move <= len(self.keys):
                key = self.keys[move]
                if self.rig.ledger.is_over(key):
                    self.rig.core.abort([key])
                else:
                    self.rig.abort(key)
        elif isinstance(move, int):
            self.rig.run(steps=move)

    def _rules(self, form: int) -> dict[str, Any]:
        if not self._grammars:
            return {}
        return {"structured_outputs": FORMS[form], "grammar": self._grammars[form]}

    def check_prefixes(self) -> None:
        """Assert that every cached prefix was cached by a request with the same salt."""
        size = self.rig.ready.block_size
        for key, ask in self.asks.items():
            cached = self.rig.ledger.requests[key].num_cached
            assert cached % size == 0 and cached < max(len(ask.prompt), 1)
            if cached:
                assert self.rig.ledger.requests[key].num_started == 1
                assert ask.sampling.get("prompt_logprobs") is None
                assert any(
                    ask.prompt[:cached] == (*other.prompt, *self.rig.tokens(by))[:cached]
                    for by, other in self.asks.items()
                    if by != key and other.salt == ask.salt
                ), f"key {key} found {cached} tokens that nobody with its salt had"


def play(rig: CoreRig, schedule_moves: list[Move], grammars: Sequence[Grammar] = ()) -> None:
    schedule = Schedule(rig, list(grammars))
    for move in schedule_moves:
        schedule.make(move)
    rig.run()

    for key in schedule.keys:
        rig.check_output(key)
    schedule.check_prefixes()
    rig.check_budget()
    stats = rig.core.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, rig.core.num_inflight) == (0, 0, 0, 0)
    assert rig.core.num_requests == 0
    assert rig.executor.collected == len(rig.plans) == stats.steps
    assert rig.executor.max_in_flight <= 2
    assert not any(name.endswith(("miss", "fallback")) for name in stats.lookups)
