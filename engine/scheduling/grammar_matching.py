"""Matches outputs against their grammars, within a CPU-time limit per step."""

import time
from collections.abc import Iterable

from engine.request import FINISHED, Request

MAX_MATCHING_S = 0.025
"""CPU time after which `match` or `catch_up` matches no further output token; the bitmasks of draft
tokens have a separate limit of the same size. Seconds. MAX_STEP_FUEL and MAX_STEP_ITEMS limit the
time of the last token; ordinary grammars take 0.05 ms per token."""
MAX_DRAFT_STEP_S = 0.001
"""Mean time per token, in seconds, above which drafts of a grammar get no bitmask."""


class GrammarMatching:
    """Matches the new tokens of requests, at least one token per step, fastest grammars first.
    Requests that are not matched within the time limit of a step are behind: they are matched in
    later steps, while other requests are scheduled.

    Grammars without a time limit (see Grammar) are always matched completely.
    """

    def __init__(self) -> None:
        self._behind: list[Request] = []
        """Requests with unmatched tokens after the latest `match`."""
        self._waiting: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether `catch_up` has anything to do."""
        return bool(self._waiting)

    def match(self, requests: Iterable[Request]) -> list[tuple[Request, str]]:
        """Match the unmatched tokens of `requests`. Returns the requests whose grammar cannot
        continue, with the reasons."""
        failed, _, self._behind = _matched(requests)
        return failed

    @property
    def has_behind(self) -> bool:
        """Whether the latest `match` left requests with unmatched tokens."""
        return bool(self._behind)

    def take_behind(self) -> list[Request]:
        """Take the requests that the latest `match` left with unmatched tokens."""
        behind, self._behind = self._behind, []
        return behind

    def add(self, request: Request) -> None:
        """Add a request that is behind and in the state MATCHING."""
        self._waiting.append(request)

    def catch_up(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Match tokens of the added requests. Returns the requests without unmatched tokens, and
        the requests whose grammar cannot continue, with the reasons. Both are removed."""
        unfinished = [request for request in self._waiting if request.state != FINISHED]
        failed, ready, self._waiting = _matched(unfinished)
        return ready, failed


def _matched(
    requests: Iterable[Request],
) -> tuple[list[tuple[Request, str]], list[Request], list[Request]]:
    """(failed requests with reasons, requests without unmatched tokens, requests that are
    behind)."""
    failed: list[tuple[Request, str]] = []
    ready: list[Request] = []
    behind: list[Request] = []
    end_s = time.thread_time() + MAX_MATCHING_S
    num_matched = 0
    for request in sorted(requests, key=_mean_step_s):
        guide, error = request.guide, None
        assert guide is not None, f"request {request.key} has no grammar"
        while request.num_unmatched and not error:
            if guide.limits_time and num_matched and time.thread_time() > end_s:
                break
            error = request.advance_grammar()
            num_matched += 1
        if error:
            failed.append((request, error))
        elif request.num_unmatched:
            behind.append(request)
        else:
            ready.append(request)
    return failed, ready, behind


def _mean_step_s(request: Request) -> float:
    return request.guide.mean_step_s if request.guide else 0.0
