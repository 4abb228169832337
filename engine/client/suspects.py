"""Poison-request detection: finds the request that keeps crashing engines."""

from collections.abc import Collection

from engine.client.output_queue import RequestOutputQueue

MAX_DEATHS, MAX_EXTERNAL_DEATHS = 2, 3
"""Consecutive crashes with a request as the only suspect before the request is failed. The second
limit applies if another process killed the engine (operator, OOM killer) in any of these crashes:
two such kills may hit the same request by chance."""


def find_poison_request(
    queues: Collection[RequestOutputQueue], *, is_external: bool
) -> RequestOutputQueue | None:
    """Update the crash counts of `queues`, the requests that were open when an engine crashed, and
    return the poison request if there is one. `is_external`: another process killed the engine.

    A request is a suspect if the engine had scheduled it and sent no output for it. A single
    suspect is counted; several suspects are marked, and the engine runs them one at a time.
    """
    suspects = []
    for queue in queues:
        if queue.has_progressed:
            queue.is_suspect = False
            queue.num_deaths = queue.num_external_deaths = 0
        elif queue.num_waiting_tokens < 0:
            queue.is_suspect = True
            suspects.append(queue)
    if not suspects:
        # A crash without suspects has another cause: reset all counts.
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
    """Sort key for resuming requests: requests that had started, then suspects (which the engine
    starts one at a time), then requests that never started.

    Suspects with fewer crashes go first, so that a crash with an unrelated cause is not counted
    against the same request twice.
    """
    if queue.is_suspect:
        return 1, queue.num_deaths
    return (0 if queue.has_started else 2), 0
