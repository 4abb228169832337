"""Grammar masks of a plan: masks that are part of the plan, and deferred masks sent after it."""

import time

from engine.request import FINISHED, Request
from engine.scheduling.grammar_matching import MAX_DRAFT_STEP_S, MAX_MATCHING_S
from engine.structured_output.token_bitmask import Bitmask, has
from hpu.protocol import GrammarMasks, StepPlan


def add_masks(plan: StepPlan, sampling: list[Request]) -> list[Request]:
    """Add the masks of `sampling`, the requests with a grammar that sample in `plan`. Returns
    the deferred requests, whose last token is still on the device: their masks are sent after
    the plan."""
    known = [request for request in sampling if request.num_computed_tokens <= request.num_tokens]
    deferred = [request for request in sampling if request.num_computed_tokens > request.num_tokens]
    plan.masked_requests = [request.req_index for request in known]
    plan.masks, plan.mask_counts = _masks_of(known)
    plan.deferred_requests = [request.req_index for request in deferred]
    return deferred


def deferred_masks(plan: StepPlan, deferred: list[Request]) -> GrammarMasks:
    """Masks of the requests that `add_masks` deferred. Call it after the results of all earlier
    plans were processed."""
    # Finished requests sample once more without a mask; their token is dropped.
    unfinished = [
        (req_index, request)
        for req_index, request in zip(plan.deferred_requests, deferred, strict=True)
        if request.state != FINISHED
    ]
    masks, counts = _masks_of([request for _, request in unfinished])
    return GrammarMasks(plan.step, [req_index for req_index, _ in unfinished], masks, counts)


def _masks_of(requests: list[Request]) -> tuple[memoryview, list[int]]:
    """(concatenated bitmasks, bitmasks per request); the counts are empty if each request has a
    single bitmask."""
    end_s = time.thread_time() + MAX_MATCHING_S
    bitmasks = [_bitmasks(request, end_s) for request in requests]
    counts = [len(request_masks) for request_masks in bitmasks]
    data = b"".join(bitmask.tobytes() for request_masks in bitmasks for bitmask in request_masks)
    return memoryview(data), counts if max(counts, default=1) > 1 else []


def _bitmasks(request: Request, end_s: float) -> list[Bitmask]:
    """Bitmask of the next token, followed by a bitmask after each draft token that the grammar
    allows. Drafts of a slow grammar get no bitmask, nor, if the grammar limits time, drafts after
    `end_s` on this thread's CPU clock."""
    assert request.guide is not None
    bitmasks = [request.guide.bitmask]
    if not request.drafts or request.guide.mean_step_s > MAX_DRAFT_STEP_S:
        return bitmasks
    guide = request.guide.fork()
    for token in request.drafts:
        if guide.limits_time and time.thread_time() > end_s:
            break
        # No token follows an end token.
        if token in request.end_ids or not has(guide.bitmask, token) or guide.advance(token):
            break
        bitmasks.append(guide.bitmask)
    return bitmasks
