"""Kills of each process: which process notices, and what remains."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
from counting_worker import ROOT, sockets_in
from engine_rig import EngineRig, asking, engine_rig, eventually, prompt_of, read_all, request_of
from live import alive, children_of, workers_of
from waits import WAIT_S

from config.errors import EngineDied
from engine.client.output_queue import RequestOutputQueue


async def streaming(rig: EngineRig, count: int) -> list[RequestOutputQueue]:
    """Requests that have received some of their tokens."""
    boxes: list[RequestOutputQueue] = [
        rig.client.add(request_of(prompt_of(1), asking(4000))) for _ in range(count)
    ]
    await asyncio.gather(*(box.get() for box in boxes))
    return boxes


@pytest.mark.parametrize("victim", ["engine", "worker"])
async def test_kill_9_fails_every_request_and_leaves_no_process_or_file(victim: str) -> None:
    async with engine_rig("step_s=0.01", executor="mp") as rig:
        (worker,) = workers_of(rig.engine.pid)
        boxes = await streaming(rig, 20)

        os.kill(rig.engine.pid if victim == "engine" else worker, signal.SIGKILL)
        reading = asyncio.gather(*map(read_all, boxes), return_exceptions=True)
        endings = await asyncio.wait_for(reading, WAIT_S)

        assert all(
            isinstance(end, EngineDied) and "was killed by SIGKILL" in str(end) for end in endings
        ), endings
        assert await eventually(lambda: rig.engine.poll() is not None)
        assert rig.engine.poll() != 0
        assert await eventually(lambda: not alive(worker))
        with pytest.raises(EngineDied):
            rig.client.add(request_of(prompt_of(1), asking(1)))
    assert sockets_in(rig.directory) == []


async def test_a_worker_that_dies_while_idle_ends_the_engine() -> None:
    async with engine_rig(executor="mp") as rig:
        (worker,) = workers_of(rig.engine.pid)

        os.kill(worker, signal.SIGKILL)

        assert await eventually(lambda: rig.client.failure is not None)
        assert await eventually(lambda: rig.engine.poll() is not None)


async def test_a_front_end_detects_a_death_without_a_notification() -> None:
    async with engine_rig("step_s=0.01") as rig:
        rig.engine._on_exit = None
        (box,) = await streaming(rig, 1)

        os.kill(rig.engine.pid, signal.SIGKILL)

        with pytest.raises(EngineDied, match="disconnected"):
            await asyncio.wait_for(read_all(box), WAIT_S)


PARENT = """
import sys, time
sys.path[:0] = [{root!r}, {root!r} + "/tests/support"]
from counting_worker import counting_command
from engine_rig import counting_config
from engine.client.launcher import EngineOrders, launch
from engine.transport.channels import SocketDirectory
directory = SocketDirectory()
command = counting_command("engine")
launch(EngineOrders(counting_config(executor="mp"), directory.path, 1, "t"), command=command)
print(directory.path, flush=True)
time.sleep(60)
"""


def test_children_exit_and_clean_up_when_the_parent_is_killed() -> None:
    code = PARENT.format(root=str(ROOT))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        directory = it.stdout.readline().strip()
        deadline = time.monotonic() + WAIT_S
        while len(family := children_of(it.pid)) < 2:
            assert time.monotonic() < deadline, family
            time.sleep(0.02)

        it.kill()
        deadline = time.monotonic() + WAIT_S
        while any(map(alive, family)) and time.monotonic() < deadline:
            time.sleep(0.02)

    assert not any(map(alive, family))
    assert not os.path.exists(directory)
