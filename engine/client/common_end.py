"""FailurePropagation: engines that step together end together, with the same reason."""

import asyncio
from collections.abc import Sequence

from engine.client.base import CAUSE_GRACE_S, SingleEngineClient
from engine.client.state import Failure


class IndependentEnds:
    """Ends of engines that do not step together: the end of an engine has no effect on other
    engines."""

    def end(self, failure: Failure) -> None:
        """Does nothing: the engines end independently."""


class FailurePropagation(IndependentEnds):
    """Ends the clients of all engines when the first engine ends. The end of an engine makes
    collectives in the other engines fail, and their failures may arrive first. A failure that may
    be a consequence is therefore reported after CAUSE_GRACE_S, unless the cause arrives before."""

    def __init__(self, engines: Sequence[SingleEngineClient]) -> None:
        self._engines = engines
        self._cause: tuple[int, Failure] | None = None
        self._has_ended = False
        for engine in engines:
            engine.on_failure(self._report)

    def _report(self, engine: int, failure: Failure) -> None:
        if self._cause is None:
            self._cause = engine, failure
            if failure.may_follow:
                asyncio.get_running_loop().call_later(CAUSE_GRACE_S, self._end)
                return
        elif failure.may_follow or engine == self._cause[0] or not self._cause[1].may_follow:
            return
        self._cause = engine, failure
        self._end()

    def end(self, failure: Failure) -> None:
        """End all clients with `failure`, unless they have ended."""
        if not self._has_ended:
            self._has_ended = True
            for engine in self._engines:
                engine.end(failure)

    def _end(self) -> None:
        assert self._cause is not None, "an end has a cause"
        number, failure = self._cause
        message = failure.message
        if not failure.is_config:
            message = (
                f"engine {number} has ended, and all engines with it, since they share experts: "
                f"{message}"
            )
        self.end(failure._replace(message=message, is_logged=failure.is_config))
