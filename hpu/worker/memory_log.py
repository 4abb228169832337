"""Log lines with the memory that each part of the start-up takes, in the format of vLLM's Gaudi
fork, since its users' scripts parse them."""

import logging
from typing import NamedTuple

from config.errors import bytes_text
from hpu.backends.base import Backend
from hpu.host import usable_memory

logger = logging.getLogger(__name__)


class MemoryUse(NamedTuple):
    """Used and total bytes of the device and of the host."""

    device_used: int
    device_total: int
    host_used: int
    host_total: int


def memory_use(backend: Backend) -> MemoryUse:
    """Memory that is currently in use."""
    free, total = backend.memory()
    host_free, host_total = usable_memory()
    return MemoryUse(total - free, total, host_total - host_free, host_total)


def log_taken(
    what: str,
    before: MemoryUse,
    backend: Backend,
    *,
    device_bytes: int = 0,
    seconds: float = 0.0,
) -> None:
    """Log the memory that `what` took since `before`, and the memory in use now.

    Args:
        device_bytes: device bytes that it took; 0: the difference of the device memory in use.
        seconds: its duration; 0: not logged.
    """
    now = memory_use(backend)
    host_bytes = now.host_used - before.host_used
    device_bytes = device_bytes or now.device_used - before.device_used
    parts = {backend.memory_name: (device_bytes, now.device_used, now.device_total)}
    parts.setdefault("host", (host_bytes, now.host_used, now.host_total))
    texts = [_part(where, *sizes) for where, sizes in parts.items()]
    fields = {"device_bytes": device_bytes, "host_bytes": host_bytes, **_fields(now)}
    took = f", in {seconds:.1f} s" if seconds else ""
    fields |= {"seconds": round(seconds, 3)} if seconds else {}
    logger.info("%s took %s%s", what, " and ".join(texts), took, extra={"fields": fields})


def _part(where: str, taken: int, used: int, total: int) -> str:
    sign = "-" if taken < 0 else ""
    return (
        f"{sign}{bytes_text(abs(taken))} of {where} memory "
        f"({bytes_text(used)}/{bytes_text(total)} used)"
    )


def _fields(use: MemoryUse) -> dict[str, float]:
    return {f"{name}_bytes": value for name, value in use._asdict().items()}
