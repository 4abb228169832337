"""Engines of an `LLM`: a single engine on a thread of this process, or several engines in
processes. Also their configuration, including the settings that the self-test selects."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from config.engine import EngineConfig
from config.errors import ConfigError
from config.loading.env import environment
from config.loading.flags import FLAGS
from config.loading.sources import Loaded, from_keywords
from config.log import LogConfig
from engine.client.base import EngineClient
from engine.client.inproc import InprocClient
from engine.client.launcher import (
    EngineOrders,
    EngineProcesses,
    SocketDirectory,
    front_end_endpoints,
    new_token,
)
from engine.client.queue_limits import QueueLimits
from engine.client.router import RouterClient
from engine.client.zmq import ZmqClient
from engine.reports.doctor import this_machine
from engine.selftest.start import with_selftest

STOP_S = 5.0
SERVER_GROUPS = ("HTTP", "TLS")
SWITCHES = {"on": True, "off": False}


def with_fallbacks(keywords: Mapping[str, object]) -> Loaded:
    """Configuration from `keywords`, with the settings that avoid failed checks of the self-test.
    Raises ConfigError."""
    loaded = from_keywords(**keywords)
    _refuse_server_keywords(loaded)

    def change(flags: Mapping[str, str]) -> Loaded:
        values = {
            name.replace("-", "_"): SWITCHES.get(value, value) for name, value in flags.items()
        }
        return from_keywords(**{**keywords, **values})

    return with_selftest(loaded, loaded, this_machine(environment()), change)


def _refuse_server_keywords(loaded: Loaded) -> None:
    """Raises ConfigError if a keyword is a setting of the HTTP server. A variable or file may be
    for other commands."""
    for flag in FLAGS:
        source = loaded.sources[flag.key][1]
        if flag.setting.group in SERVER_GROUPS and source.startswith("keyword"):
            word = source.removeprefix("keyword ")
            raise ConfigError(f"{word} has no effect: LLM starts no HTTP server; leave {word} out")


def make_client(config: EngineConfig, log: LogConfig) -> EngineClient:
    """Create the client of the engines in `config`. Its `start` starts the engines, and its `close`
    stops them. Raises ConfigError for engines on other hosts."""
    parallel = config.data_parallel
    if parallel.data_parallel_size == 1:
        return InprocClient(config)
    if parallel.num_remote:
        raise ConfigError(
            f"--data-parallel-size is {parallel.data_parallel_size} and {parallel.num_local} of "
            "these engines are on this host: LLM runs all of its engines on this host"
        )
    return ProcessesClient(config, log)


class ProcessesClient(RouterClient):
    """A RouterClient that starts and stops its engines.

    Queued prompt tokens are not limited, because LLM limits the number of open requests.
    """

    def __init__(
        self, config: EngineConfig, log: LogConfig, *, command: Sequence[str] | None = None
    ) -> None:
        """`command` replaces the entry point of the engines."""
        self._command = command
        self._config = config
        self._log = log
        self._directory, self._token = SocketDirectory(), new_token()
        self._processes: EngineProcesses | None = None
        num_engines = config.data_parallel.data_parallel_size
        limits = QueueLimits(
            max_requests=config.scheduler.max_queue_len * num_engines, max_prompt_tokens=2**62
        )
        endpoints = front_end_endpoints(config.data_parallel, self._directory.path, 0)
        super().__init__(
            [
                ZmqClient(endpoint, 0, limits, token=self._token, engine=engine)
                for engine, endpoint in enumerate(endpoints)
            ],
            prefix_caching=config.cache.enable_prefix_caching,
            are_coupled=config.num_coupled_engines > 1,
        )

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()

        def on_exit(engine: int, reason: str) -> None:
            # RuntimeError: the loop is closed, and no request waits for the engine.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self.engines[engine].fail, reason)

        self._processes = EngineProcesses(
            EngineOrders(self._config, self._directory.path, 1, self._token, log=self._log),
            on_exit=on_exit,
            command=self._command,
        )

    async def close(self) -> None:
        """Disconnect, stop the processes and wait for them; safe to call twice."""
        self.fail("the client was closed")
        if self._processes is not None:
            # Blocks this thread, because executors accept no work during interpreter exit.
            self._processes.close(STOP_S)
        await super().close()
        self._directory.close()
