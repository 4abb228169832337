"""RequestResource: a resource that requests need beside KV blocks, such as an adapter slot."""

from collections.abc import Set
from typing import NamedTuple

from engine.request import Request
from engine.transport.messages import AddRequest
from hpu.protocol import StepPlan, ToWorker


class Refusal(NamedTuple):
    """Why an engine cannot serve a request."""

    error: str
    param: str | None = None
    """Parameter at fault, see Finish.param."""


class RequestResource:
    """A resource that a scheduler reserves for requests. The methods here reserve nothing.

    A scheduler calls `add_request` once, `start` and `release` for each run, since a preempted
    request runs again, and `finish_request` once.
    """

    holds_back_later = False
    """Whether no later request may start while `fit` returns 0 for a running request."""

    def refusal(self, message: AddRequest) -> Refusal | None:
        """Why a request can never get its share of the resource; None if it can."""
        return None

    def add_request(self, request: Request) -> None:
        """Register a request that waits."""

    def begin_step(self) -> None:
        """Begin a plan."""

    def fit(self, request: Request, start: int, count: int) -> int:
        """How many of the `count` prompt tokens from `start` on can be scheduled now."""
        return count

    def start(self, request: Request) -> None:
        """Reserve the resource for a request that begins to run."""

    def add_chunk(self, request: Request, start: int, count: int) -> None:
        """Schedule `count` prompt tokens from `start` on, which fit."""

    def fill_plan(self, plan: StepPlan) -> None:
        """End the plan: add the orders of the resource for the workers."""

    def take_messages(self) -> list[ToWorker]:
        """Messages to send to the workers now, beside the plans."""
        return []

    def release(self, request: Request) -> None:
        """Release what a running request has reserved: it ended or was preempted."""

    def finish_request(self, request: Request) -> None:
        """Forget a request that ended, running or not."""

    def reset(self) -> None:
        """Forget what the workers have lost; no request may be running."""

    def check(self, running: Set[int]) -> None:
        """Raise AssertionError unless the resource's state is consistent. `running`: keys of the
        requests that may have reserved it."""
