"""InprocClient: the same protocol with the engine on a thread of this process."""

import asyncio
import threading

import pytest
from counting_worker import REFUSAL, make_counting_executor
from engine_rig import asking, counting_config, generate, prompt_of, read_all, request_of
from waits import WAIT_S

from config.errors import ConfigError, EngineDied
from engine.client.inproc import InprocClient
from engine.transport.messages import BACKGROUND_WARMUP, Progress


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "engine"]


@pytest.mark.parametrize("executor", ["uni", "mp"])
@pytest.mark.parametrize("manners", ["", "several=4"])
async def test_requests_are_served_concurrently(executor: str, manners: str) -> None:
    client = InprocClient(counting_config(manners, executor=executor), make_counting_executor)
    await client.start()
    ready = await asyncio.wait_for(client.wait_ready(), WAIT_S)

    outputs = await asyncio.gather(*(generate(client, 1 + number % 9) for number in range(100)))
    await client.close()

    assert outputs == [list(range(1 + number % 9)) for number in range(100)]
    assert ready.block_size == 16
    assert engine_threads() == []


async def test_closing_ends_open_requests_and_may_be_repeated() -> None:
    client = InprocClient(counting_config("step_s=0.01"), make_counting_executor)
    await client.start()
    await client.wait_ready()
    box = client.add(request_of(prompt_of(1), asking(4000)))
    await box.get()

    await client.close()
    await client.close()

    with pytest.raises(EngineDied, match="closed"):
        await read_all(box)
    assert engine_threads() == []


async def test_a_client_that_never_started_can_be_closed() -> None:
    client = InprocClient(counting_config(), make_counting_executor)

    await client.close()

    assert client.failure is not None


async def test_a_start_error_has_the_workers_message() -> None:
    client = InprocClient(counting_config("refuse=1"), make_counting_executor)
    await client.start()

    with pytest.raises(ConfigError, match=REFUSAL):
        await client.wait_ready()
    await client.close()


async def test_controls_and_aborts_work_as_over_a_socket() -> None:
    client = InprocClient(counting_config("step_s=0.002"), make_counting_executor)
    await client.start()
    await client.wait_ready()
    box = client.add(request_of(prompt_of(1), asking(4000)))
    await box.get()

    client.abort([box.key])
    answer = await client.control("ping")
    _, finish = await read_all(box)
    await client.close()

    assert (answer, finish.reason) == ("pong", "abort")


@pytest.mark.parametrize("executor", ["uni", "mp"])
async def test_deferred_warmup_runs_between_requests_and_is_reported(executor: str) -> None:
    config = counting_config("later=4", executor=executor)
    client = InprocClient(config, make_counting_executor)
    await client.start()
    await asyncio.wait_for(client.wait_ready(), WAIT_S)

    output = await generate(client, 40)
    deadline = asyncio.get_running_loop().time() + 10
    while client.progress != Progress(0, BACKGROUND_WARMUP, 4, 4):
        assert asyncio.get_running_loop().time() < deadline, client.progress
        await asyncio.sleep(0.02)
    again = await generate(client, 5)
    await client.close()

    assert (output, again) == (list(range(40)), list(range(5)))
