"""RequestTerms: what an engine has to know of the request that a sequence belongs to."""

import time
from dataclasses import dataclass

from config.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """The same for all sequences of one request."""

    deadline_s: float | None = None
    """Until when it must have ended, as time.perf_counter(); None: no limit."""
    tenant: int = 0
    """A number for its API key, from a digest; 0 without one."""

    def timeout_s(self) -> float:
        """The time that is left; 0: no limit. Raises DeadlineExceeded if none is."""
        if self.deadline_s is None:
            return 0.0
        left_s = self.deadline_s - time.perf_counter()
        if left_s <= 0:
            raise DeadlineExceeded("it was not sent to the engine")
        return left_s


NO_TERMS = RequestTerms()
