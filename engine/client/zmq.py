"""EngineClient: how a front-end asks for tokens. The asyncio client over ZeroMQ lives here too."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Protocol

from config.errors import EngineDied, Overloaded, RequestFailed, UserError
from config.params.pooling import PoolingParams
from config.params.sampling import SamplingParams
from engine.client.output_queue import Box, OutputRouter
from engine.client.output_queue import Update as Update  # part of this contract
from engine.kv_cache.prefix_hashes import TOKEN_BYTES
from engine.transport.channels import HIGH_WATER, RouterSocket, ZmqContext, rejection_warning
from engine.transport.messages import (
    SLEEP,
    WAKE_UP,
    Abort,
    AddRequest,
    Control,
    EngineStats,
    Failed,
    FromEngine,
    Hello,
    Progress,
    Ready,
    Reply,
    StepOutput,
    ToEngine,
)

CONTROL_TIMEOUT_S = 30.0
SLOW_CONTROLS_S = {SLEEP: 600.0, WAKE_UP: 7200.0}
"""Of those that move weights, and warm up."""

UNASKED = SamplingParams()
"""Of a request that samples nothing."""

LINES_PER_ENGINE = 2
"""One that it listens on and one that it talks on."""

HANGUP_GRACE_S = 0.3
"""How long a better reason (the exit code) may take to arrive once the engine has hung up."""


class RequestOutputQueue(Protocol):
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
        sampling: SamplingParams = UNASKED,
        *,
        priority: int = 0,
        cache_salt: str = "",
        name: str = "",
        pooling: PoolingParams | None = None,
        goes_on: bool = False,
    ) -> RequestOutputQueue:
        """Send one sequence (`sampling.n` is ignored); `name` is for the engine's log. With
        `pooling` it is answered by vectors, and `sampling` stays out. What `goes_on` with a
        sequence that was let in before finds no line full, and is next.
        Raises Overloaded when the line is full or the engine is not ready, EngineDied when it is
        gone. Does not wait."""
        ...

    def abort(self, keys: list[int]) -> None:
        """Forget these; safe for unknown or finished keys, at any moment. Their mailboxes end with
        a Finish of reason abort."""
        ...

    async def control(self, name: str, **arguments: Any) -> Any:
        """Call the engine and wait for its answer."""
        ...

    async def wait_ready(self) -> Ready:
        """Wait for start-up to end. Raises EngineDied when it fails, ConfigError if a setting is
        to blame."""
        ...

    async def close(self) -> None:
        """Hang up. Open mailboxes end with EngineDied."""
        ...


class QueueClient:
    """What every EngineClient does alike. How a message goes down is left to `_send`, which says
    False when the engine cannot take it now; what comes up is handed to `_receive`."""

    def __init__(
        self, index: int, *, max_queued_requests: int, max_queued_prompt_tokens: int
    ) -> None:
        self._room = OutputRouter(
            index, max_requests=max_queued_requests, max_prompt_tokens=max_queued_prompt_tokens
        )
        self._unsent_aborts: list[int] = []
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_numbers = itertools.count(1)

    def _send(self, message: ToEngine) -> bool:
        raise NotImplementedError

    @property
    def ready(self) -> Ready | None:
        return self._room.ready

    @property
    def progress(self) -> Progress | None:
        return self._room.progress

    @property
    def failure(self) -> str | None:
        return self._room.failure

    @property
    def stats(self) -> EngineStats:
        return self._room.stats

    @property
    def is_misconfigured(self) -> bool:
        """Whether the engine is gone because of a setting."""
        return self._room.is_config

    def on_stats(self, observe: Callable[[EngineStats], None] | None) -> None:
        """Call `observe` with every EngineStats that arrives: the samples in it come only once."""
        self._room.on_stats = observe

    def add(
        self,
        prompt: bytes | memoryview,
        sampling: SamplingParams = UNASKED,
        *,
        priority: int = 0,
        cache_salt: str = "",
        name: str = "",
        pooling: PoolingParams | None = None,
        goes_on: bool = False,
    ) -> Box:
        """See EngineClient.add. Raises UserError for what no message can carry."""
        tokens = memoryview(prompt).cast("B")
        box = self._room.open(tokens.nbytes // TOKEN_BYTES, goes_on=goes_on)
        try:
            message = AddRequest(
                box.key,
                tokens,
                sampling,
                priority,
                cache_salt,
                name=name,
                pooling=pooling,
                goes_on=goes_on,
            )
            sent = self._send(message)
        except (TypeError, ValueError) as error:
            self._room.forget(box.key)
            raise UserError(f"the request cannot be encoded: {error}") from error
        if not sent:
            self._room.forget(box.key)
            raise Overloaded(f"The engine has left {HIGH_WATER} messages unread.")
        return box

    def abort(self, keys: list[int]) -> None:
        self._unsent_aborts += self._room.abort(keys)
        self._send_aborts()

    async def control(self, name: str, **arguments: Any) -> Any:
        """See EngineClient.control. Raises UserError when the engine refuses, RequestFailed when it
        fails or does not answer within CONTROL_TIMEOUT_S (or SLOW_CONTROLS_S), Overloaded before it
        is ready or when it has no room, EngineDied when it is gone."""
        self._room.check_ready()
        timeout_s = SLOW_CONTROLS_S.get(name, CONTROL_TIMEOUT_S)
        call = next(self._call_numbers)
        answer = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(Control(call, name, arguments))
            return await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:
            raise RequestFailed(
                f"the engine did not answer {name} within {timeout_s:g} s"
            ) from None
        finally:
            del self._calls[call]

    async def wait_ready(self) -> Ready:
        return await self._room.wait_ready()

    def fail(self, message: str, *, is_config: bool = False) -> None:
        """The engine is gone: whoever watches its process tells us here, on the loop's thread.
        `is_config`: a setting is to blame."""
        self._room.fail(message, is_config=is_config)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDied(message))

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, StepOutput):
            self._room.deliver(message)
            if self._unsent_aborts:
                self._send_aborts()
        elif isinstance(message, Reply):
            self._answer(message)
        elif isinstance(message, Progress):
            self._room.progress = message
        elif isinstance(message, Ready):
            self._room.become_ready(message)
        elif isinstance(message, Failed):
            self.fail(message.message, is_config=message.is_config)

    def _send_aborts(self) -> None:
        # Aborts must not be lost: what the engine cannot take now is sent after its next message.
        if self._unsent_aborts and self._send(Abort(self._unsent_aborts)):
            self._unsent_aborts = []

    def _answer(self, reply: Reply) -> None:
        answer = self._calls.get(reply.call)
        if answer is None or answer.done():
            return
        if reply.is_refusal:
            answer.set_exception(UserError(reply.error or "refused", code=reply.code))
        elif reply.is_overload:
            answer.set_exception(Overloaded(reply.error or "no room"))
        elif reply.error is not None:
            answer.set_exception(RequestFailed(reply.error))
        else:
            answer.set_result(reply.value)


class ZmqClient(QueueClient):
    """An EngineClient over a request channel. Belongs to one asyncio loop."""

    def __init__(
        self,
        endpoint: str,
        index: int,
        *,
        token: str,
        max_queued_requests: int,
        max_queued_prompt_tokens: int,
    ) -> None:
        """`index` is this front-end's number; `endpoint` is where it waits for its engine, which
        presents `token`."""
        super().__init__(
            index,
            max_queued_requests=max_queued_requests,
            max_queued_prompt_tokens=max_queued_prompt_tokens,
        )
        self._endpoint = endpoint
        self._wires = ZmqContext(token)
        self._rejected = rejection_warning(endpoint)
        self._on_rejected_peer: Callable[[], None] = lambda: None
        self._switchboard: RouterSocket[ToEngine, FromEngine] | None = None
        self._engine: bytes | None = None
        self._early_ready: Ready | None = None

    async def start(self) -> None:
        """Listen for the engine. Raises ConfigError when the address cannot be taken."""
        self._switchboard = self._wires.bind_router(
            self._endpoint, FromEngine, num_peers=LINES_PER_ENGINE
        )
        self._switchboard.listen(self._receive_from, self._hung_up, self._reject)

    def on_rejected_peer(self, observe: Callable[[], None]) -> None:
        """Call `observe` for each connection that ended without having been the engine's."""
        self._on_rejected_peer = observe

    async def close(self) -> None:
        self.fail("the client was closed")
        if self._switchboard is not None:
            self._switchboard.close()
            self._switchboard = None
        self._wires.close()

    def _send(self, message: ToEngine) -> bool:
        return (
            self._switchboard is not None
            and self._engine is not None
            and self._switchboard.send(self._engine, message)
        )

    def _receive_from(self, peer: bytes, message: FromEngine) -> None:
        if isinstance(message, Hello):
            # The line that says hello is the one the engine listens on; the other one only talks.
            self._engine = peer
        elif isinstance(message, Ready):
            self._early_ready = message
        else:
            self._receive(message)
            return
        if self._engine is not None and self._early_ready is not None:
            self._receive(self._early_ready)

    def _reject(self) -> None:
        self._rejected.add()
        self._on_rejected_peer()

    def _hung_up(self) -> None:
        asyncio.get_running_loop().call_later(HANGUP_GRACE_S, self.fail, "the engine has hung up")
