"""RequestTerms and RequestLimits: what all sequences of a request have in common in the engine."""

import time
from dataclasses import dataclass

from config.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Deadline and tenant of a request, shared by all of its sequences."""

    deadline_s: float | None = None
    """Deadline on the clock of time.perf_counter(); None: no limit."""
    tenant: int = 0
    """60 bits of the API key's digest; 0 without an API key or without --fair-share."""

    def timeout_s(self) -> float:
        """Seconds until the deadline; 0: no limit. Raises DeadlineExceeded if the deadline has
        passed."""
        if self.deadline_s is None:
            return 0.0
        left_s = self.deadline_s - time.perf_counter()
        if left_s <= 0:
            raise DeadlineExceeded("it was not sent to the engine")
        return left_s


NO_LIMITS = RequestLimits()


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """Priority, cache, adapter and limits of a request, shared by all of its sequences."""

    priority: int = 0
    cache_salt: str = ""
    """Salt of the prefix cache."""
    name: str = ""
    """Request id for logs."""
    adapter: str = ""
    """Content hash of the LoRA adapter (LoRAInfo.content); empty without an adapter."""
    limits: RequestLimits = NO_LIMITS


DEFAULT_TERMS = RequestTerms()
