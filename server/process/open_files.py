"""Limit on open files: raised at start, and compared with the queue limits."""

import logging
import resource

logger = logging.getLogger(__name__)

MAX_OPEN_FILES = 65_536
"""Upper bound for the raised limit: some libraries loop over all possible descriptors, and hard
limits can be 10^9."""
RESERVED = 128
"""Descriptors of an API server besides client connections: files, logs, sockets to the engine."""


def raise_limit() -> None:
    """Raise the soft limit to the hard limit, but at most to MAX_OPEN_FILES; child processes
    inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError) as error:
        logger.warning("The limit of open files stays %d, not %d: %s", soft, target, error)
        return
    logger.info("The limit of open files was raised from %d to %d", soft, target)


def max_connections() -> int:
    """Maximum number of client connections of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_OPEN_FILES
    return max(soft - RESERVED, soft // 2)


def warn_if_low(max_queued_requests: int, max_num_seqs: int) -> None:
    """Warn if connections would run out before the queue is full."""
    num_needed = max_queued_requests + max_num_seqs
    num_possible = max_connections()
    if num_possible < num_needed:
        logger.warning(
            "The limit of open files allows %d connections, but --max-queued-requests %d and "
            "--max-num-seqs %d need %d: raise it to %d (ulimit -n, LimitNOFILE=, --ulimit nofile=)",
            num_possible,
            max_queued_requests,
            max_num_seqs,
            num_needed,
            num_needed + RESERVED,
        )
