"""The whole engine process: real sockets and processes, with a worker that counts tokens."""

import asyncio
import os
import signal
import time

import pytest
from counting_worker import REFUSAL
from delays import least_awaited
from engine_rig import asking, engine_rig, eventually, generate, prompt_of, read_all, request_of
from live import cpu_seconds, workers_of
from waits import WAIT_S

from config.errors import ConfigError, EngineDied, Overloaded, UserError
from engine.process.child_process import STOP


@pytest.mark.parametrize("executor", ["uni", "mp"])
async def test_a_request_gets_its_tokens_in_order_and_one_finish(executor: str) -> None:
    async with engine_rig(executor=executor) as rig:
        tokens = await generate(rig.client, 50)

    assert tokens == list(range(50))


async def test_a_thousand_requests_each_get_all_of_their_tokens() -> None:
    async with engine_rig() as rig:
        outputs = await asyncio.gather(
            *(generate(rig.client, 1 + number % 7) for number in range(1000))
        )

    assert outputs == [list(range(1 + number % 7)) for number in range(1000)]


async def test_startup_reports_its_progress_and_accepts_no_requests() -> None:
    async with engine_rig("start_s=1", ready=False) as rig:
        assert await eventually(lambda: rig.client.progress is not None)

        with pytest.raises(
            Overloaded, match=r"starting \(loading the weights, \S+ \S+ of \S+ \S+\)"
        ) as caught:
            rig.client.add(request_of(prompt_of(1), asking(1)))

    assert caught.value.type == "server_error"


@pytest.mark.parametrize("executor", ["uni", "mp"])
async def test_a_start_error_reaches_the_client_with_the_workers_message(
    executor: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # An earlier test may have left a log handler whose stream is closed.
    monkeypatch.setattr("logging.raiseExceptions", False)
    async with engine_rig("refuse=1", executor=executor, ready=False) as rig:
        with pytest.raises(ConfigError) as caught:
            await asyncio.wait_for(rig.client.wait_ready(), WAIT_S)
        assert await eventually(lambda: rig.engine.poll() is not None)
        code = rig.engine.poll()

    assert str(caught.value) == REFUSAL
    assert code not in (0, None)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("executor", ["uni", "mp"])
async def test_a_failed_worker_ends_the_engine_and_fails_every_request(executor: str) -> None:
    async with engine_rig("crash_at=20", executor=executor) as rig:
        boxes = [rig.client.add(request_of(prompt_of(1), asking(1000))) for _ in range(5)]

        endings = await asyncio.gather(*map(read_all, boxes), return_exceptions=True)
        assert await eventually(lambda: rig.engine.poll() is not None)
        code = rig.engine.poll()

    assert all(isinstance(end, EngineDied) and "too many" in str(end) for end in endings), endings
    assert code == 1


async def test_an_idle_engine_uses_under_2_percent_of_a_core() -> None:
    async with engine_rig(executor="mp") as rig:
        await generate(rig.client, 5)

        async def used_s() -> float:
            """CPU seconds of the engine or of this process in 3 s, whichever is more."""
            before, own = cpu_seconds(rig.engine.pid), time.process_time()
            await asyncio.sleep(3)
            return max(cpu_seconds(rig.engine.pid) - before, time.process_time() - own)

        assert await least_awaited(used_s, 0.06) < 0.06


async def test_a_stop_informs_the_front_end_and_exits_with_0() -> None:
    async with engine_rig("step_s=0.01") as rig:
        box = rig.client.add(request_of(prompt_of(1), asking(4000)))
        await box.get()

        os.kill(rig.engine.pid, STOP)
        with pytest.raises(EngineDied, match="told to stop"):
            await read_all(box)
        assert await eventually(lambda: rig.engine.poll() is not None)
        code = rig.engine.poll()

    assert code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_to_the_whole_group_are_left_to_the_parent(number: signal.Signals) -> None:
    async with engine_rig(executor="mp") as rig:
        os.kill(rig.engine.pid, number)
        os.kill(workers_of(rig.engine.pid)[-1], number)

        tokens = await generate(rig.client, 3)

    assert tokens == [0, 1, 2]


async def test_requests_beyond_the_engines_bound_are_refused() -> None:
    async with engine_rig("step_s=0.3", max_queue_len=40) as rig:
        boxes = [rig.client.add(request_of(prompt_of(1), asking(1))) for _ in range(200)]

        finishes = [finish for _, finish in await asyncio.gather(*map(read_all, boxes))]

    reasons = [finish.reason for finish in finishes]
    refused = next(finish for finish in finishes if finish.reason == "error")
    assert reasons.count("length") >= 40
    assert "at most 40 may wait" in str(refused.error)


async def test_controls_are_answered_and_refusals_have_a_reason() -> None:
    async with engine_rig() as rig:
        answer = await rig.client.control("ping")

        with pytest.raises(UserError, match="dance"):
            await rig.client.control("dance")

    assert answer == "pong"


async def test_a_worker_call_is_answered_and_its_refusal_reaches_the_caller() -> None:
    async with engine_rig(executor="mp") as rig:
        answer = await rig.client.control("start_profile")

        with pytest.raises(UserError, match="was called before") as refused:
            await rig.client.control("start_profile")

    assert answer == "start_profile after 0 plans"
    assert refused.value.code == "twice"
