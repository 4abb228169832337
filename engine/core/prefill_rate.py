"""PrefillRate: measures the rate at which an engine computes queued prompt tokens."""

MEAN_S = 5.0
"""Longest time window of the exponentially weighted mean; seconds."""
FIRST_S = 0.5
"""Initial time window of the mean, and its window when a queue forms; seconds."""


class PrefillRate:
    """Prompt tokens per second of wall time, prefix-cache hits included.

    Measured over steps that compute prompt tokens, and over all steps while requests wait: a batch
    of long decodes delays waiting requests and lowers the rate. A rate measured without a queue
    does not show this delay, so its time window shrinks to FIRST_S when a queue forms.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """0 before the first measurement."""
        self._last_s = 0.0
        self._window_s = FIRST_S
        """Time window of the mean, growing from FIRST_S to MEAN_S."""
        self._had_waiting = False

    def begin(self, now_s: float) -> None:
        """Start measuring after a time without plans in flight."""
        self._last_s = now_s

    def observe(self, num_tokens: int, now_s: float, *, has_waiting: bool) -> None:
        """Record a finished step. `num_tokens`: prompt tokens that it computed, plus the
        prefix-cache hits of the requests that it started."""
        seconds, self._last_s = now_s - self._last_s, now_s
        if has_waiting and not self._had_waiting:
            self._window_s = FIRST_S
        self._had_waiting = has_waiting
        if seconds <= 0 or not (num_tokens or has_waiting):
            return
        rate = num_tokens / seconds
        if not self.tokens_per_s:
            self.tokens_per_s = rate
            return
        self.tokens_per_s += seconds / (self._window_s + seconds) * (rate - self.tokens_per_s)
        self._window_s = min(MEAN_S, self._window_s + seconds)
