"""Requests that outlive their engine: what its successor is sent, and which may be the cause."""

from collections.abc import Sequence

import pytest

from config.params.sampling import SamplingParams
from engine.client.output_queue import OutputRouter, RequestOutputQueue
from engine.client.queue_limits import QueueLimits
from engine.client.resumption import (
    MAX_DEATHS,
    MAX_EXTERNAL_DEATHS,
    Resumer,
    find_poison_request,
    resume_order,
)
from engine.transport.messages import AddRequest, StepOutput

LIMITS = {"max_requests": 100, "max_prompt_tokens": 1000}


class Front:
    """A front end with the requests of a single engine."""

    def __init__(self) -> None:
        self.router = OutputRouter(1 << 20, QueueLimits(**LIMITS))
        self.sent: list[AddRequest] = []
        self.room = 100
        self.cause: RequestOutputQueue | None = None
        self.resumer = Resumer(self.router, self._send)

    def _send(self, message: AddRequest) -> bool:
        self.room -= 1
        if self.room < 0:
            return False
        self.sent.append(message)
        return True

    def open(self, *prompt: int) -> RequestOutputQueue:
        queue = self.router.open(len(prompt))
        raw = b"".join(token.to_bytes(4, "little") for token in prompt)
        queue.message = AddRequest(queue.key, memoryview(raw), SamplingParams())
        return queue

    def says(self, started: Sequence[RequestOutputQueue]) -> None:
        """These requests start."""
        keys = [queue.key for queue in started]
        self.router.deliver(StepOutput(0, started=keys, started_cached=[0] * len(keys)))

    def gives(self, queue: RequestOutputQueue, *tokens: int) -> None:
        self.router.deliver(
            StepOutput(0, keys=[queue.key], counts=[len(tokens)], tokens=list(tokens))
        )

    def restart(self, *, is_external: bool = True) -> bool:
        """The engine dies, and a new engine is ready. Gives whether a request was ended."""
        self.resumer.withdraw()
        self.cause = find_poison_request(self.router.queues, is_external=is_external)
        if self.cause is not None:
            self.router.finish(self.cause, "the cause")
        self.sent.clear()
        self.resumer.adopt(sorted(self.router.queues, key=resume_order), self.router)
        return self.cause is not None

    @property
    def sent_keys(self) -> list[int]:
        return [message.key for message in self.sent]

    @property
    def suspects(self) -> list[int]:
        """Keys of the requests that the engine must start alone."""
        return [
            message.key
            for message in self.sent
            if message.resumption and message.resumption.is_suspect
        ]


@pytest.fixture
def front() -> Front:
    return Front()


def outputs(front: Front) -> list[list[int]]:
    found = []
    for message in front.sent:
        assert message.resumption is not None
        found.append(list(message.resumption.output.cast("I")))
    return found


async def test_a_request_goes_on_behind_its_tokens_under_a_new_key(front: Front) -> None:
    queue = front.open(1, 2)
    before = queue.key
    front.says([queue])
    front.gives(queue, 7, 8)

    front.restart()

    assert outputs(front) == [[7, 8]] and front.sent[0].key == queue.key != before
    front.router.deliver(StepOutput(0, keys=[before], tokens=[99]))  # still from the dead engine
    front.gives(queue, 9)
    assert (await queue.get()).tokens == [7, 8, 9]


def test_requests_go_on_in_order_and_count_as_waiting_until_they_start(front: Front) -> None:
    first, second = front.open(1, 2), front.open(3, 4, 5)
    front.says([first])
    front.gives(first, 7)
    assert front.router.num_waiting_tokens == 3

    front.restart()

    assert front.sent_keys == [first.key, second.key]
    assert front.router.num_waiting_tokens == 5
    front.says([first, second])
    assert front.router.num_waiting_tokens == 0


def test_what_the_engine_has_no_room_for_is_sent_later(front: Front) -> None:
    queues = [front.open(n) for n in range(5)]
    front.room = 2

    front.restart()

    assert len(front.sent) == 2 and not front.resumer.is_done
    front.router.abort([queues[2].key])
    front.room = 100
    front.resumer.proceed()
    kept = [queues[i].key for i in (0, 1, 3, 4)]
    assert front.sent_keys == kept and front.resumer.is_done


def test_those_that_got_nothing_are_suspects_and_go_before_those_that_waited(
    front: Front,
) -> None:
    waiting, first, running, second = (front.open(n) for n in range(4))
    front.says([running, first, second])
    front.gives(running, 7)

    assert not front.restart()

    assert front.sent_keys == [running.key, first.key, second.key, waiting.key]
    assert front.suspects == [first.key, second.key]


@pytest.mark.parametrize(
    "ends", [[False, False], [True, True, True], [True, False, False], [False, True, False]]
)
def test_one_over_which_engines_die_alone_is_not_sent_again(front: Front, ends: list[bool]) -> None:
    """At two deaths, at three if another process ended any of the engines."""
    good, poison = front.open(1), front.open(2)
    for is_external in ends[:-1]:
        front.says([good, poison])
        front.gives(good, 7)
        assert not front.restart(is_external=is_external)
        assert front.suspects == [poison.key]
    front.says([good, poison])
    front.gives(good, 7)

    assert front.restart(is_external=ends[-1])

    assert front.sent_keys == [good.key]
    assert front.cause is poison and poison.num_deaths == len(ends)


def test_a_death_without_any_clears_all(front: Front) -> None:
    running, suspect = front.open(1), front.open(2)
    for _ in range(2 * MAX_EXTERNAL_DEATHS):
        front.says([running, suspect])
        front.gives(running, 7)
        assert not front.restart()
        assert front.sent_keys == [running.key, suspect.key]
        front.says([running])
        front.gives(running, 7)
        assert not front.restart()


@pytest.mark.parametrize("is_external", [False, True])
def test_one_that_was_alone_at_a_death_is_tried_behind_the_others(
    front: Front, is_external: bool
) -> None:
    first, second = front.open(1), front.open(2)
    front.says([first, second])
    front.restart(is_external=is_external)
    max_deaths = MAX_EXTERNAL_DEATHS if is_external else MAX_DEATHS
    tried = []
    for _ in range(2 * (max_deaths - 1)):
        tried.append(first if front.sent_keys[0] == first.key else second)
        front.says(tried[-1:])
        assert not front.restart(is_external=is_external)

    assert [tried.count(first), tried.count(second)] == [max_deaths - 1] * 2
    last, other = (first, second) if front.sent_keys[0] == first.key else (second, first)
    front.says([last])
    assert front.restart(is_external=is_external) and front.sent_keys == [other.key]


def test_a_token_clears_a_request(front: Front) -> None:
    queue = front.open(1)
    for token in range(5):
        front.says([queue])
        assert not front.restart(is_external=False)
        front.says([queue])
        front.gives(queue, token)
        assert not front.restart(is_external=False)


def test_one_that_cannot_be_encoded_ends_alone(front: Front) -> None:
    good, wrong = front.open(1), front.open(2)
    send = front.resumer._send

    def refusing(message: AddRequest) -> bool:
        if message.key == wrong.key:
            raise TypeError("no number")
        return send(message)

    front.resumer._send = refusing

    front.restart()

    assert front.sent_keys == [good.key]
    assert not front.router.is_open(wrong)
