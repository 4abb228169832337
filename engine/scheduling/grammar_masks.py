"""Grammar masks of a plan: those that travel with it, and those that follow it."""

from engine.request import FINISHED, Request
from hpu.protocol import GrammarMasks, StepPlan


def add_masks(plan: StepPlan, sampling: list[Request]) -> list[Request]:
    """Add the masks of `sampling`, the requests with a grammar that sample in `plan`. Returns the
    deferred ones, whose last token is still on the device: their masks follow the plan."""
    known = [request for request in sampling if request.num_computed_tokens <= request.num_tokens]
    deferred = [request for request in sampling if request.num_computed_tokens > request.num_tokens]
    plan.masked_requests = [request.req_index for request in known]
    plan.masks = _masks_of(known)
    plan.deferred_requests = [request.req_index for request in deferred]
    return deferred


def deferred_masks(plan: StepPlan, deferred: list[Request]) -> GrammarMasks:
    """The masks of the requests that `add_masks` deferred, once the results of all earlier plans
    are known."""
    # A request that these results finished samples once more without a mask; the token is dropped.
    unfinished = [
        (req_index, request)
        for req_index, request in zip(plan.deferred_requests, deferred, strict=True)
        if request.state != FINISHED
    ]
    masks = _masks_of([request for _, request in unfinished])
    return GrammarMasks(plan.step, [req_index for req_index, _ in unfinished], masks)


def _masks_of(requests: list[Request]) -> memoryview:
    guides = [request.guide for request in requests]
    return memoryview(b"".join(guide.bitmask.tobytes() for guide in guides if guide is not None))
