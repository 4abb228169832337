"""engine/client/output_queue.py: delivery of merged output to a slow reader."""

import asyncio
import math
import weakref
from array import array

import msgspec

from engine.client.output_queue import MAX_READ_VALUES, OutputRouter, RequestOutputQueue, Update
from engine.client.queue_limits import QueueLimits
from engine.transport.messages import Finish, StepOutput
from hpu.protocol import Logprobs

NUM_STEPS = 5_000
WIDTH = 21


def logprobs_of(token: int) -> Logprobs:
    """Log-probabilities of a token and of the 20 most likely tokens."""
    ids, values, ranks = array("i", [token] * WIDTH), array("f", [0.0] * WIDTH), array("i", [1])
    return Logprobs(WIDTH - 1, memoryview(ids), memoryview(values), memoryview(ranks))


def unread(*, with_logprobs: bool) -> RequestOutputQueue:
    """The queue of a request that ended before its reader read any output."""
    router = OutputRouter(0, QueueLimits(max_requests=10, max_prompt_tokens=1_000))
    queue = router.open(1)
    router.deliver(StepOutput(0, started=[queue.key], started_cached=[7]))
    for token in range(NUM_STEPS):
        logprobs = [(queue.key, logprobs_of(token))] if with_logprobs else []
        router.deliver(StepOutput(0, keys=[queue.key], tokens=[token], logprobs=logprobs))
    router.deliver(StepOutput(0, finished=[Finish(queue.key, "length")]))
    return queue


async def test_other_tasks_run_between_the_parts_of_a_long_update() -> None:
    """A part of 65,536 tokens with 21 log-probabilities each took 3 s of the event loop."""
    for width, queue in ((0, unread(with_logprobs=False)), (WIDTH, unread(with_logprobs=True))):
        tokens, turns, parts = list[int](), 0, list[Update]()
        most = MAX_READ_VALUES // (width or 1)

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(count_turns())
        while not parts or parts[-1].finish is None:
            parts.append(await queue.get())
            tokens += parts[-1].tokens
            assert len(parts[-1].tokens) <= most
            if width:
                assert [part.ids.cast("B").cast("i")[0] for part in parts[-1].logprobs] == parts[
                    -1
                ].tokens
        other.cancel()

        assert tokens == list(range(NUM_STEPS))
        assert len(parts) == math.ceil(NUM_STEPS / most) <= turns
        assert [part.num_cached_tokens for part in parts] == [7] + [None] * (len(parts) - 1)
        # Each part begins with a step that is not counted as merged.
        assert sum(part.num_merged + 1 for part in parts) == NUM_STEPS


def test_each_field_of_a_long_update_is_in_one_part() -> None:
    logprobs, finish = logprobs_of(1), Finish(0, "length")
    update = Update(
        tokens=list(range(MAX_READ_VALUES + 2)),
        num_merged=MAX_READ_VALUES + 1,
        prompt_logprobs=[logprobs],
        vectors=(1, memoryview(b"1234")),
        num_cached_tokens=7,
        finish=finish,
    )
    # Log-probabilities would make the parts shorter.
    assert {name for name in Update.__struct_fields__ if not getattr(update, name)} == {"logprobs"}

    first, rest = update.take_first(), update.take_first()

    assert rest is update
    assert msgspec.structs.asdict(first) == {
        "tokens": list(range(MAX_READ_VALUES)),
        "num_merged": MAX_READ_VALUES - 1,
        "logprobs": [],
        "prompt_logprobs": [logprobs],
        "vectors": None,
        "num_cached_tokens": 7,
        "finish": None,
    }
    assert msgspec.structs.asdict(rest) == {
        "tokens": [MAX_READ_VALUES, MAX_READ_VALUES + 1],
        "num_merged": 1,
        "logprobs": [],
        "prompt_logprobs": [],
        "vectors": (1, memoryview(b"1234")),
        "num_cached_tokens": None,
        "finish": finish,
    }


async def test_unread_log_probabilities_are_counted_and_keep_no_message() -> None:
    """A slow reader kept the log-probabilities of all requests of each step."""
    router = OutputRouter(0, QueueLimits(max_requests=10, max_prompt_tokens=1_000))
    queue, messages = router.open(1), []
    assert queue.num_unread_bytes == 0
    for token in range(3):
        part = logprobs_of(token)
        messages.append(weakref.ref(part.ids.obj))
        router.deliver(
            StepOutput(0, keys=[queue.key], tokens=[token], logprobs=[(queue.key, part)])
        )
    del part

    assert [message() is None for message in messages] == [False, True, True]
    assert queue.num_unread_bytes > 3 * 2 * 4 * WIDTH
    assert [part.ids.cast("B").cast("i")[0] for part in (await queue.get()).logprobs] == [0, 1, 2]
    assert queue.num_unread_bytes == 0
