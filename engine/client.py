"""EngineClient: how a front-end asks for tokens. The asyncio client over ZeroMQ lives here too."""

from typing import Any, Protocol

import msgspec

from config.sampling import SamplingParams
from engine.messages import EngineStats, Finish, Progress, Ready
from hpu.step import Logprobs


class Update(msgspec.Struct, gc=False):
    """All that a request has gained since its mailbox was last read."""

    tokens: list[int] = []
    logprobs: list[Logprobs] = []
    prompt_logprobs: list[Logprobs] = []
    num_cached_tokens: int | None = None
    """Set once, when the request left the waiting line."""
    finish: Finish | None = None


class Mailbox(Protocol):
    """Where a request's tokens arrive. One reader."""

    key: int

    async def get(self) -> Update:
        """Wait for something new and take all of it. Raises EngineDied, never hangs on a dead
        engine; after an update with `finish` nothing follows."""
        ...


class EngineClient(Protocol):
    """The same calls whether the engine is a process or lives in this one."""

    @property
    def ready(self) -> Ready | None:
        """What the engine found out at start; None until it takes requests."""
        ...

    @property
    def progress(self) -> Progress | None:
        """Where start-up stands."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine is gone; None while it lives."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The latest gauges and counters."""
        ...

    def add(
        self,
        prompt: bytes | memoryview,
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Mailbox:
        """Send one sequence (`sampling.n` is ignored). Raises Overloaded when the line is full or the
        engine is not ready, EngineDied when it is gone. Does not wait."""
        ...

    def abort(self, keys: list[int]) -> None:
        """Forget these; safe for unknown or finished keys, at any moment. Their mailboxes end with a
        Finish of reason abort."""
        ...

    async def control(self, name: str, **arguments: Any) -> Any:
        """Call the engine and wait for its answer."""
        ...

    async def wait_ready(self) -> Ready:
        """Wait for start-up to end. Raises EngineDied when it fails."""
        ...

    async def close(self) -> None:
        """Hang up. Open mailboxes end with EngineDied."""
        ...
