"""States of an engine as its client sees them: Starting, Running, Lost and FailedState."""

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

from config.errors import ConfigError, EngineDied, Overloaded, ProfileWritten
from config.lora.info import LoRAInfo
from engine.transport.messages import Progress, Ready

RETRY_AFTER_S = 5


class Failure(NamedTuple):
    """Why an engine has ended."""

    message: str
    is_config: bool = False
    """Whether the failure is a ConfigError that is not a CheckpointError."""
    is_logged: bool = False
    """Whether the engine reported the failure itself, so that a front end need not log it as an
    error."""
    may_follow: bool = False
    """Whether the failure may be a consequence of another engine's end."""
    is_external: bool | None = False
    """Whether the cause lies outside of the engine's computation, for example a kill by another
    process; None: not known yet."""
    is_profile: bool = False
    """Whether the engine has written the profile that it was started for (ProfileWritten)."""


class Pause(NamedTuple):
    """Interruption between an engine crash and the start of its replacement."""

    cause: Failure
    num_requests: int
    """Open requests at the crash, which are resumed."""
    seconds: float


class EngineState:
    """State of an engine. The defaults describe an engine that accepts no requests."""

    ready: Ready | None = None
    """The engine's report at the end of its start-up; None until it accepts requests."""
    lost: Failure | None = None
    """Why the engine crashed, while it is being restarted."""
    failure: str | None = None
    """Why the engine has ended for good; None while it runs or is being restarted."""
    is_misconfigured = False
    """Whether the engine ended with a ConfigError that is not a CheckpointError."""
    has_profile = False
    """Whether the engine has ended with a ProfileWritten."""
    is_failure_logged = False
    """Whether the engine has reported the failure itself, so that a front end need not log it as an
    error."""
    is_running = False
    """Whether requests can be sent."""
    is_lost = False
    """Whether the engine is being restarted after a crash."""
    has_failed = False
    """Whether the engine has ended for good."""
    adapters: Mapping[str, LoRAInfo] = {}
    """Adapters that a crashed engine served, by name."""
    since_s = 0.0
    """Monotonic time of the crash, while the engine is being restarted."""
    num_requests = 0
    """Open requests at the crash."""
    is_pending = False
    """Whether the engine has crashed and the cause is not known yet."""

    def check(self, progress: Progress | None) -> None:
        """Raise EngineDied if the engine has failed, or Overloaded with its `progress` during its
        first start-up."""

    def check_running(self) -> None:
        """Raise Overloaded while the engine is being restarted."""

    def on_ready(self, ready: Ready) -> "EngineState":
        """The state after the end of a start-up."""
        return Running(ready)

    def report(self) -> Ready:
        """The engine's report. Raises EngineDied, ConfigError if an invalid setting is the cause,
        or ProfileWritten at the end of a profile run."""
        raise EngineDied(self.failure)

    def cause(self, failure: Failure) -> Failure:
        """The cause to report when the engine ends with `failure`."""
        return failure

    def pause(self) -> "Pause":
        """The interruption from the crash until now. Only for a lost engine."""
        raise AssertionError("an engine that was not lost is restored")

    def explain(self, failure: Failure) -> None:
        """Set the cause of a crash, unless the engine has reported the cause itself."""

    def settle(self) -> None:
        """Stop waiting for the cause of a crash."""


class Starting(EngineState):
    """The engine has not finished its first start-up."""

    def check(self, progress: Progress | None) -> None:
        doing = f" ({progress.text})" if progress else ""
        raise Overloaded(
            f"The engine is starting{doing}, it accepts no requests yet.",
            retry_after_s=RETRY_AFTER_S,
            type="server_error",
        )


class Running(EngineState):
    """The engine accepts requests."""

    is_running = True

    def __init__(self, ready: Ready) -> None:
        self.ready: Ready = ready

    def report(self) -> Ready:
        return self.ready


class Lost(EngineState):
    """The engine has crashed and is being replaced. New requests are still accepted. Open requests
    are kept until the new engine, or another engine, resumes them."""

    is_lost = True

    def __init__(self, ready: Ready, cause: Failure, adapters: Mapping[str, LoRAInfo]) -> None:
        self.ready: Ready = ready
        self.lost: Failure = cause
        self.adapters = dict(adapters)
        self.is_pending = False
        self.since_s = time.monotonic()

    def check_running(self) -> None:
        raise self.restarting()

    def restarting(self) -> Overloaded:
        return Overloaded(
            f"The engine is being restarted: {self.lost.message}.",
            retry_after_s=RETRY_AFTER_S,
            type="server_error",
        )

    def on_ready(self, ready: Ready) -> EngineState:
        # Stay in this state: requests of the crashed engine are resumed before new requests start.
        self.ready = ready
        return self

    def report(self) -> Ready:
        return self.ready

    def cause(self, failure: Failure) -> Failure:
        return self.lost if self.lost.is_logged else failure

    def wait_for_cause(self, timer: asyncio.TimerHandle) -> None:
        """Mark the cause as unknown until `settle` is called; `settle` cancels `timer`."""
        self.is_pending = True
        self._timer = timer

    def settle(self) -> None:
        if self.is_pending:
            self.is_pending = False
            self._timer.cancel()

    def pause(self) -> Pause:
        return Pause(self.lost, self.num_requests, time.monotonic() - self.since_s)

    def explain(self, failure: Failure) -> None:
        if not self.lost.is_logged:
            self.lost = failure


class FailedState(EngineState):
    """The engine has ended for good."""

    has_failed = True

    def __init__(self, failure: Failure, ready: Ready | None) -> None:
        self.ready = ready
        self.failure: str = failure.message
        self.is_misconfigured = failure.is_config
        self.has_profile = failure.is_profile
        self.is_failure_logged = failure.is_logged

    def check(self, progress: Progress | None) -> None:
        raise EngineDied(self.failure)

    def on_ready(self, ready: Ready) -> EngineState:
        self.ready = ready
        return self

    def report(self) -> Ready:
        if self.has_profile:
            raise ProfileWritten(self.failure)
        if self.is_misconfigured:
            raise ConfigError(self.failure)
        raise EngineDied(self.failure)
