"""Which request may be the cause of an engine's death."""

from collections.abc import Collection

from engine.client.output_queue import RequestOutputQueue

MAX_DEATHS, MAX_EXTERNAL_DEATHS = 2, 3
"""So often in a row an engine may die while it computes the next token of this request and of no
other whose next token it has not computed before: then the request is the cause. More often, if
another one ended the engine at any of them, as a person or the kernel for want of memory: that may
hit the same request twice by chance."""


def find_cause(
    queues: Collection[RequestOutputQueue], *, is_external: bool
) -> RequestOutputQueue | None:
    """The engine with these open requests has died, ended by another one if `is_external`. Suspects
    those that it had started and given nothing; the one that is the cause, if that is known now."""
    suspects = []
    for queue in queues:
        if queue.has_gained:
            queue.is_suspect = False
            queue.num_deaths = queue.num_external_deaths = 0
        elif queue.num_waiting_tokens < 0:
            queue.is_suspect = True
            suspects.append(queue)
    if not suspects:
        # Deaths have another cause than a request.
        for queue in queues:
            queue.num_deaths = queue.num_external_deaths = 0
    if len(suspects) != 1:
        return None
    (queue,) = suspects
    queue.num_deaths += 1
    queue.num_external_deaths += is_external
    max_deaths = MAX_EXTERNAL_DEATHS if queue.num_external_deaths else MAX_DEATHS
    return queue if queue.num_deaths >= max_deaths else None


def resume_order(queue: RequestOutputQueue) -> tuple[int, int]:
    """The smallest goes on first: requests that had started, then those over which an engine may
    have died, which the engine starts one at a time, then those that only waited. Of the suspects
    those that were alone at a death come last: if deaths have another cause than a request, it is
    another one that is alone at the next."""
    if queue.is_suspect:
        return 1, queue.num_deaths
    return (0 if queue.has_started else 2), 0
