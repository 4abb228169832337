"""InprocClient: EngineClient with the engine in a thread of this process."""

import asyncio
import threading
from collections.abc import Callable

from config.engine import EngineConfig
from config.errors import EngineDied
from config.native import panics_as_errors
from engine.client.base import SingleEngineClient
from engine.client.queue_limits import QueueLimits
from engine.core.loop import EngineLoop, describe_failure
from engine.executors.base import Executor
from engine.executors.select import make_executor
from engine.transport.channels import SocketDirectory
from engine.transport.messages import Failed, FromEngine, ToEngine


class Closed(Exception):
    """Reason with which the client stops the engine loop."""


class InprocClient(SingleEngineClient):
    """EngineClient without an engine process. Belongs to a single asyncio loop. The number of
    waiting prompt tokens is unlimited."""

    def __init__(
        self,
        config: EngineConfig,
        make_executor: Callable[
            [EngineConfig, str, Callable[[EngineDied], None]], Executor
        ] = make_executor,
    ) -> None:
        super().__init__(
            0, QueueLimits(max_requests=config.scheduler.max_queue_len, max_prompt_tokens=2**62)
        )
        self._config = config
        self._make_executor = make_executor
        self._engine = EngineLoop(config, self._emit, num_front_ends=1)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Start the engine thread; `wait_ready` waits for the end of the start-up."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Stop the engine thread and the worker, and wait for them; safe to call twice."""
        self.fail("the client was closed")
        self._engine.stop(Closed())
        if self._thread.is_alive():
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _send(self, message: ToEngine) -> bool:
        self._engine.receive(0, message)
        return True

    def _emit(self, front_end: int | None, message: FromEngine) -> None:
        # RuntimeError: the asyncio loop was closed without `close`, so nobody reads the messages.
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._receive, message)
        except RuntimeError:
            self._engine.stop(Closed())

    def _run(self) -> None:
        executor: Executor | None = None
        directory = SocketDirectory()
        try:
            executor = self._make_executor(
                self._config,
                directory.path,
                self._engine.stop,
            )
            with panics_as_errors():
                self._engine.run(executor)
        except Closed:
            failed = Failed(0, "the client was closed")
        except Exception as error:
            failed = describe_failure(error)
        finally:
            if executor is not None:
                executor.close()
            directory.close()
        self._emit(None, failed)
