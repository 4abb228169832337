"""Utilization of a simulated device behind real engine and worker processes, without an API
server."""

import asyncio
import dataclasses
from pathlib import Path

from benchmarks.host_rig import make_config
from benchmarks.null_device import null_engine_command
from config.parallel import ParallelConfig
from config.params.sampling import SamplingParams
from engine.client.launcher import EngineOrders, launch
from engine.client.queue_limits import QueueLimits
from engine.client.zmq import ZmqClient
from engine.process.engine_orders import front_end_endpoint
from engine.transport.channels import SocketDirectory, new_token
from engine.transport.messages import UNSENT, AddRequest, EngineStats

WARM_STEPS = 200
PROMPT_TOKENS = 128


@dataclasses.dataclass
class Steps:
    """Times of the decode steps of a batch."""

    seconds: list[float]
    """Seconds of each step, including the device's idle time before it."""
    engine_s: float
    """CPU seconds of the engine's thread per step."""
    sockets_s: float
    """CPU seconds per step of the engine's other threads, which read and write its sockets."""


async def watch_steps(
    num_rows: int, step_s: float, num_steps: int, *, num_workers: int = 1
) -> Steps:
    """Times of the steps of a batch on a device with `step_s` per step. `num_workers` processes get
    each plan; the first answers."""
    config = dataclasses.replace(
        make_config(num_rows, PROMPT_TOKENS + 3 * num_rows + WARM_STEPS + 2 * num_steps),
        parallel=ParallelConfig(tensor_parallel_size=num_workers),
    )
    directory, token = SocketDirectory(), new_token()
    client = ZmqClient(
        front_end_endpoint(directory.path, 0),
        0,
        QueueLimits(max_requests=num_rows, max_prompt_tokens=num_rows * PROMPT_TOKENS),
        token=token,
    )
    found: list[float] = []
    cpu: list[tuple[int, tuple[float, float]]] = []
    """(steps so far, CPU seconds of the engine) at the first and the last measured step."""
    enough = asyncio.Event()

    def on_stats(stats: EngineStats) -> None:
        if stats.running == num_rows:
            found.extend(seconds for _, seconds in stats.step_seconds)
        if (len(found) >= WARM_STEPS and not cpu) or len(found) >= WARM_STEPS + num_steps:
            cpu.append((len(found), _cpu_seconds(engine.pid)))
        if len(found) >= WARM_STEPS + num_steps:
            enough.set()

    client.on_stats(on_stats)
    await client.start()
    engine = launch(
        EngineOrders(config, directory.path, 1, token), command=null_engine_command(step_s)
    )
    try:
        await asyncio.wait_for(client.wait_ready(), 60)
        params = SamplingParams(max_tokens=config.max_model_len, ignore_eos=True)
        for row in range(num_rows):
            client.add(
                AddRequest(
                    UNSENT, memoryview(bytes(4 * PROMPT_TOKENS)), params, cache_salt=str(row)
                )
            )
        await asyncio.wait_for(enough.wait(), 60 + 4 * num_steps * step_s)
    finally:
        engine.close()
        await client.close()
        directory.close()
    (first, before), (last, after) = cpu[:2]
    engine_s, sockets_s = (
        (older - other) / (last - first) for older, other in zip(after, before, strict=True)
    )
    return Steps(found[WARM_STEPS : WARM_STEPS + num_steps], engine_s, sockets_s)


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """CPU seconds of a process: of its main thread, and of all other threads."""
    main = others = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
        if task.name == str(pid):
            main += seconds
        else:
            others += seconds
    return main, others
