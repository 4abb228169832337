"""PrefillRate: how fast an engine works off the prompt tokens that wait for it."""

MEAN_S = 5.0
"""Time constant of the exponentially weighted mean."""
FIRST_S = 0.5
"""What was measured before requests began to wait counts as so much time."""


class PrefillRate:
    """Prompt tokens per second of wall time, with those found in the prefix cache.

    Measured over the steps that compute prompts, and over all steps while requests wait: a full
    batch of long decodes lowers the rate, as it delays those who wait. An engine without a queue
    tells little of that, so the mean soon forgets its rate once there is one.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        """0 before the first measurement."""
        self._last_s = 0.0
        self._window_s = FIRST_S
        """The time that the mean is over: it grows from FIRST_S to MEAN_S."""
        self._had_waiting = False

    def begin(self, now_s: float) -> None:
        """The engine was idle until now."""
        self._last_s = now_s

    def observe(self, num_tokens: int, now_s: float, *, has_waiting: bool) -> None:
        """A step has ended that computed `num_tokens` of prompts."""
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
