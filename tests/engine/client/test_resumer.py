"""Requests that outlive their engine: what its successor is sent, and which may be the cause."""

from collections.abc import Sequence

import pytest

from config.params.sampling import SamplingParams
from engine.client.output_queue import MAX_DEATHS, OutputRouter, QueueLimits, RequestOutputQueue
from engine.client.resumer import Resumer
from engine.transport.messages import AddRequest, StepOutput

LIMITS = {"max_requests": 100, "max_prompt_tokens": 1000}


class Front:
    """A front end with the requests of one engine."""

    def __init__(self) -> None:
        self.router = OutputRouter(1 << 20, QueueLimits(**LIMITS))
        self.sent: list[AddRequest] = []
        self.room = 100
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

    def restart(self) -> int:
        """The engine dies, and another one is ready; the number of requests that were ended."""
        self.resumer.withdraw()
        ended = self.router.suspect()
        self.sent.clear()
        self.resumer.adopt(list(self.router.queues), self.router)
        return ended


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

    assert [message.key for message in front.sent] == [first.key, second.key]
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
    assert [message.key for message in front.sent] == kept and front.resumer.is_done


def test_those_that_got_nothing_are_sent_one_at_a_time(front: Front) -> None:
    running, first, second, third = (front.open(n) for n in range(4))
    front.says([running, first, second, third])
    front.gives(running, 7)

    assert front.restart() == 0

    assert [message.key for message in front.sent] == [running.key]
    front.gives(running, 8)
    front.resumer.proceed()
    assert [message.key for message in front.sent] == [running.key, first.key]
    front.gives(running, 8)
    front.resumer.proceed()
    assert len(front.sent) == 2
    front.gives(first, 9)
    front.resumer.proceed()
    assert front.sent[-1].key == second.key
    front.router.abort([second.key])
    front.resumer.proceed()
    assert front.sent[-1].key == third.key


def test_what_only_waited_is_not_waited_for(front: Front) -> None:
    running, suspect, waiting = (front.open(n) for n in range(3))
    front.says([running, suspect])
    front.gives(running, 7)
    front.restart()
    assert [message.key for message in front.sent] == [running.key, waiting.key]

    front.gives(running, 8)
    front.resumer.proceed()

    assert front.sent[-1].key == suspect.key and front.resumer.is_done


async def test_one_that_ends_three_engines_alone_is_not_sent_to_a_fourth(front: Front) -> None:
    good, poison = front.open(1), front.open(2)
    for _ in range(MAX_DEATHS - 1):
        front.says([good, poison])
        front.gives(good, 7)
        front.resumer.proceed()
        assert front.restart() == 0
    front.says([good, poison])
    front.gives(good, 7)

    assert front.restart() == 1

    assert [message.key for message in front.sent] == [good.key]
    finish = (await poison.get()).finish
    assert finish is not None and finish.reason == "error"
    assert finish.error is not None and "died 3 times" in finish.error


def test_a_death_without_any_clears_all(front: Front) -> None:
    running, suspect = front.open(1), front.open(2)
    for _ in range(2 * MAX_DEATHS):
        front.says([running, suspect])
        front.gives(running, 7)
        assert front.restart() == 0
        assert [message.key for message in front.sent] == [running.key]
        front.says([running])
        front.gives(running, 7)
        assert front.restart() == 0
        front.gives(running, 7)
        front.resumer.proceed()
        assert front.sent[-1].key == suspect.key


def test_one_that_was_alone_at_a_death_is_tried_behind_the_others(front: Front) -> None:
    first, second = front.open(1), front.open(2)
    front.says([first, second])
    front.restart()
    tried = []
    for _ in range(2 * (MAX_DEATHS - 1)):
        (message,) = front.sent
        sent = first if message.key == first.key else second
        tried.append(sent)
        front.says([sent])
        assert front.restart() == 0

    assert tried == [first, second] * (MAX_DEATHS - 1)
    (message,) = front.sent
    assert message.key == first.key
    front.says([first])
    assert front.restart() == 1 and front.sent[0].key == second.key


def test_a_token_clears_a_request(front: Front) -> None:
    queue = front.open(1)
    for token in range(5):
        front.says([queue])
        assert front.restart() == 0
        front.says([queue])
        front.gives(queue, token)
        assert front.restart() == 0


def test_one_that_cannot_be_encoded_ends_alone(front: Front) -> None:
    good, wrong = front.open(1), front.open(2)
    send = front.resumer._send

    def refusing(message: AddRequest) -> bool:
        if message.key == wrong.key:
            raise TypeError("no number")
        return send(message)

    front.resumer._send = refusing

    front.restart()

    assert [message.key for message in front.sent] == [good.key]
    assert not front.router.is_open(wrong)
