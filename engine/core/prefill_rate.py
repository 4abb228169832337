"""PrefillRate: how fast an engine works off the prompt tokens that wait for it."""

import math

MEAN_S = 5.0
"""Time constant of the exponentially weighted mean."""


class PrefillRate:
    """Prompt tokens per second of wall time, with those found in the prefix cache.

    Measured over the steps that compute prompts, and over all steps while requests wait: a full
    batch of long decodes lowers the rate, as it delays those who wait.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """0 before the first measurement."""
        self._last_s = 0.0

    def begin(self, now_s: float) -> None:
        """The engine was idle until now."""
        self._last_s = now_s

    def observe(self, num_tokens: int, now_s: float, *, has_waiting: bool) -> None:
        """A step has ended that computed `num_tokens` of prompts."""
        seconds, self._last_s = now_s - self._last_s, now_s
        if seconds <= 0 or not (num_tokens or has_waiting):
            return
        rate = num_tokens / seconds
        if not self.tokens_per_s:
            self.tokens_per_s = rate
        else:
            weight = 1 - math.exp(-seconds / MEAN_S)
            self.tokens_per_s += weight * (rate - self.tokens_per_s)
