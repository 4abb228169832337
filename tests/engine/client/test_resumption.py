"""Requests that survive a crash of their engine: what the new engine receives, and which requests
may be the cause."""

import asyncio
from collections.abc import Sequence

import pytest
from scripted_client import ready

from config.lora.info import LoRAInfo
from config.params.sampling import SamplingParams
from engine.client.base import SingleEngineClient
from engine.client.output_queue import OutputRouter, RequestOutputQueue
from engine.client.queue_limits import QueueLimits
from engine.client.resumption import (
    MAX_DEATHS,
    MAX_EXTERNAL_DEATHS,
    Resumer,
    find_poison_request,
    resume_order,
)
from engine.client.state import Failure, Pause
from engine.transport.messages import (
    LOAD_ADAPTER,
    Adapters,
    AddRequest,
    Control,
    Reply,
    StepOutput,
    ToEngine,
)

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
        """Report that these requests have started."""
        keys = [queue.key for queue in started]
        self.router.deliver(StepOutput(0, started=keys, started_cached=[0] * len(keys)))

    def gives(self, queue: RequestOutputQueue, *tokens: int) -> None:
        self.router.deliver(
            StepOutput(0, keys=[queue.key], counts=[len(tokens)], tokens=list(tokens))
        )

    def restart(self, *, is_external: bool = True) -> bool:
        """Crash the engine and make a new engine ready. Returns whether a request was ended."""
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


async def test_a_request_resumes_after_its_tokens_with_a_new_key(front: Front) -> None:
    queue = front.open(1, 2)
    before = queue.key
    front.says([queue])
    front.gives(queue, 7, 8)

    front.restart()

    assert outputs(front) == [[7, 8]] and front.sent[0].key == queue.key != before
    front.router.deliver(StepOutput(0, keys=[before], tokens=[99]))  # Tokens of the dead engine.
    front.gives(queue, 9)
    assert (await queue.get()).tokens == [7, 8, 9]


def test_requests_resume_in_order_and_count_as_waiting_until_they_start(front: Front) -> None:
    first, second = front.open(1, 2), front.open(3, 4, 5)
    front.says([first])
    front.gives(first, 7)
    assert front.router.num_waiting_tokens == 3

    front.restart()

    assert front.sent_keys == [first.key, second.key]
    assert front.router.num_waiting_tokens == 5
    front.says([first, second])
    assert front.router.num_waiting_tokens == 0


def test_requests_beyond_the_queue_limit_are_resumed_later(front: Front) -> None:
    queues = [front.open(n) for n in range(5)]
    front.room = 2

    front.restart()

    assert len(front.sent) == 2 and not front.resumer.is_done
    front.router.abort([queues[2].key])
    front.room = 100
    front.resumer.proceed()
    kept = [queues[i].key for i in (0, 1, 3, 4)]
    assert front.sent_keys == kept and front.resumer.is_done


def test_started_requests_without_tokens_are_suspects_and_resume_before_waiting_requests(
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
def test_a_poison_request_is_not_sent_again(front: Front, ends: list[bool]) -> None:
    """The request fails after two crashes, or after three if another process ended any of the
    engines."""
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


def test_a_crash_without_suspects_clears_all_counts(front: Front) -> None:
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
def test_a_sole_suspect_resumes_after_the_other_suspects(front: Front, is_external: bool) -> None:
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


def test_a_token_clears_the_crash_count_of_a_request(front: Front) -> None:
    queue = front.open(1)
    for token in range(5):
        front.says([queue])
        assert not front.restart(is_external=False)
        front.says([queue])
        front.gives(queue, token)
        assert not front.restart(is_external=False)


def test_only_a_request_that_cannot_be_encoded_fails(front: Front) -> None:
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


async def test_an_update_counts_the_merged_steps_after_its_first_step(
    front: Front,
) -> None:
    queue = front.open(1, 2)
    merged = []
    for steps in ([[5], [6, 7, 8]], [[9]], [[10, 11], [12], [13]]):
        for tokens in steps:
            front.gives(queue, *tokens)
        merged.append((await queue.get()).num_merged)

    assert merged == [1, 0, 2]


class RecordingClient(SingleEngineClient):
    """A client whose engine is the test; crashes are not reported to anybody."""

    def __init__(self) -> None:
        super().__init__(0, QueueLimits(**LIMITS))
        self.sent: list[ToEngine] = []
        self.resume(self)

    async def start(self) -> None:
        """There is no engine to start."""

    async def close(self) -> None:
        """There is no engine to close."""

    def _send(self, message: ToEngine) -> bool:
        self.sent.append(message)
        return True

    def engine_lost(self, client: SingleEngineClient, *, has_poison: bool) -> None:
        """Crashes are not recorded."""

    def engine_restored(self, client: SingleEngineClient, pause: Pause) -> None:
        """Recoveries are not recorded."""


async def test_adapters_of_a_crashed_engine_stay_listed_until_they_are_loaded_again() -> None:
    client, kept = RecordingClient(), LoRAInfo("kept", "/kept", "0", 4, 8)
    own = LoRAInfo("own", "/own", "1", 4, 8)
    client._receive(Adapters([own, kept]))
    client._receive(ready())

    client._lose(Failure("killed", is_external=True))
    client._receive(Adapters([own]))
    meanwhile = [*client.adapters]
    client._receive(ready())
    await asyncio.sleep(0)
    (load,) = client.sent
    assert isinstance(load, Control)
    client._receive(Adapters([own, kept]))
    client._receive(Reply(load.call, None))
    for _ in range(3):
        await asyncio.sleep(0)

    assert meanwhile == ["own", "kept"]
    assert load.arguments["adapter"] == kept.named
    assert [*client.adapters] == ["own", "kept"]
    assert client.state.is_running


def waiting_calls(client: RecordingClient) -> list[int]:
    """The calls that load adapters and wait for an answer."""
    loads = [message for message in client.sent if isinstance(message, Control)]
    assert {load.name for load in loads} <= {LOAD_ADAPTER}
    return [load.call for load in loads if load.call in client._calls]


@pytest.mark.parametrize("restarts", [True, False])
async def test_a_crash_while_adapters_are_loaded_again_leaves_no_call_that_waits(
    restarts: bool,
) -> None:
    client, kept = RecordingClient(), LoRAInfo("kept", "/kept", "0", 4, 8)
    client._receive(Adapters([kept]))
    client._receive(ready())
    client._lose(Failure("killed", is_external=True))
    client._receive(Adapters([]))
    client._receive(ready())
    await asyncio.sleep(0)
    (first,) = waiting_calls(client)

    client._lose(Failure("killed again", is_external=True))
    if restarts:
        client._receive(Adapters([]))
        client._receive(ready())
    else:
        client.end(Failure("killed too often"))
    for _ in range(5):
        await asyncio.sleep(0)

    left = waiting_calls(client)
    assert first not in left and len(left) == restarts
    assert len(client._reloading) == restarts
    client.end(Failure("the test has ended"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
