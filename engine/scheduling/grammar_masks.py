"""GrammarMasks of a plan: what may come next in its rows with a grammar. They travel with the plan
where a
row's last token is known, else behind it. Knows no executor and no queue."""

from engine.core.request import ENDED, Request
from hpu.protocol import GrammarMasks, StepPlan


def add_masks(plan: StepPlan, sampling: list[Request]) -> list[Request]:
    """Mask whoever samples in `plan` and has a grammar. Gives those whose mask must follow, since
    their last token is on its way: in the order of the plan's late rows."""
    known = [request for request in sampling if request.computed <= request.known]
    late = [request for request in sampling if request.computed > request.known]
    plan.masked_requests = [request.row for request in known]
    plan.masks = _masks_of(known)
    plan.deferred_requests = [request.row for request in late]
    return late


def late_masks(plan: StepPlan, late: list[Request]) -> GrammarMasks:
    """What `add_masks` left out, now that the result of every plan before is known."""
    # Who ended by that result samples once too often, and whatever it likes.
    going_on = [
        (row, request)
        for row, request in zip(plan.deferred_requests, late, strict=True)
        if request.state != ENDED
    ]
    masks = _masks_of([request for _, request in going_on])
    return GrammarMasks(plan.step, [row for row, _ in going_on], masks)


def _masks_of(requests: list[Request]) -> memoryview:
    guides = [request.guide for request in requests]
    return memoryview(b"".join(guide.words.tobytes() for guide in guides if guide is not None))
