"""RequestResource: a resource that requests need in addition to KV blocks, such as an adapter slot.
WholePrompts: a scheduling rule with the same interface."""

from collections.abc import Set
from typing import NamedTuple

from engine.request import Request
from engine.transport.messages import AddRequest
from hpu.protocol import StepPlan, ToWorker


class Refusal(NamedTuple):
    """Why an engine cannot serve a request."""

    error: str
    param: str | None = None
    """Parameter that the error is about; see Finish.param."""
    is_retryable: bool = False
    """Whether a retry may succeed later; see Finish.is_retryable."""


class RequestResource:
    """Base class of resources that a scheduler reserves for requests; its methods reserve nothing.

    A scheduler calls `add_request` and `finish_request` once per request, and `start` and `release`
    for each run, since a preempted request runs again.
    """

    holds_back_later = False
    """Whether later requests must not start while `fit` returns 0 for a running request."""

    def refusal(self, message: AddRequest) -> Refusal | None:
        """Why the resource can never serve a request; None if it can."""
        return None

    def add_request(self, request: Request) -> None:
        """Register a waiting request."""

    def begin_step(self) -> None:
        """Reset the state of the previous plan, before a plan is built."""

    def fit(self, request: Request, start: int, count: int) -> int:
        """How many of the `count` prefill tokens from `start` can be scheduled now."""
        return count

    def start(self, request: Request) -> None:
        """Reserve the resource for a request that starts to run."""

    def add_chunk(self, request: Request, start: int, count: int) -> None:
        """Schedule `count` prefill tokens from `start`; `fit` has returned at least `count`."""

    def fill_plan(self, plan: StepPlan) -> None:
        """Complete the plan: add the resource's instructions for the workers."""

    def take_messages(self) -> list[ToWorker]:
        """Messages to send to the workers now, separately from plans."""
        return []

    def release(self, request: Request) -> None:
        """Release the reservation of a running request that has ended or was preempted."""

    def finish_request(self, request: Request) -> None:
        """Remove a request that has ended, whether it was running or not."""

    def reset(self) -> None:
        """Clear state that the workers have lost; no request may be running."""

    def check(self, running: Set[int]) -> None:
        """Raise AssertionError unless the resource's state is consistent. `running`: keys of the
        requests that may hold reservations."""


class WholePrompts(RequestResource):
    """Rule of a scheduler without chunked prefill: a prompt runs only if all its uncached tokens
    fit the step. Must be the last resource, because it checks the token count that the other
    resources have allowed."""

    def fit(self, request: Request, start: int, count: int) -> int:
        return count if start + count == request.num_tokens else 0
