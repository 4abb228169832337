"""Utilisation of a simulated device behind real engine and worker processes, without an API
server."""

import asyncio

from benchmarks.host_rig import make_config
from benchmarks.null_device import null_engine_command
from config.params.sampling import SamplingParams
from engine.client.launcher import launch
from engine.client.output_queue import QueueLimits
from engine.client.zmq import ZmqClient
from engine.core.engine_process import front_end_endpoint
from engine.transport.channels import SocketDirectory, new_token
from engine.transport.messages import EngineStats

WARM_STEPS = 200
PROMPT_TOKENS = 128


async def step_seconds(num_rows: int, step_s: float, num_steps: int) -> list[float]:
    """Seconds of each decode step of a batch on a device with `step_s` per step, including the
    device's idle time before it. `step_s` is the minimum."""
    config = make_config(num_rows, PROMPT_TOKENS + 3 * num_rows + WARM_STEPS + 2 * num_steps)
    directory, token = SocketDirectory(), new_token()
    client = ZmqClient(
        front_end_endpoint(directory.path, 0),
        0,
        QueueLimits(max_requests=num_rows, max_prompt_tokens=num_rows * PROMPT_TOKENS),
        token=token,
    )
    found: list[float] = []
    enough = asyncio.Event()

    def on_stats(stats: EngineStats) -> None:
        if stats.running == num_rows:
            found.extend(seconds for _, seconds in stats.step_seconds)
        if len(found) >= WARM_STEPS + num_steps:
            enough.set()

    client.on_stats(on_stats)
    await client.start()
    engine = launch(config, directory.path, 1, token=token, command=null_engine_command(step_s))
    try:
        await asyncio.wait_for(client.wait_ready(), 60)
        params = SamplingParams(max_tokens=config.max_model_len, ignore_eos=True)
        for row in range(num_rows):
            client.add(bytes(4 * PROMPT_TOKENS), params, cache_salt=str(row))
        await asyncio.wait_for(enough.wait(), 60 + 4 * num_steps * step_s)
        return found[WARM_STEPS : WARM_STEPS + num_steps]
    finally:
        engine.close()
        await client.close()
        directory.close()
