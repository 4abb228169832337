"""Chooses how results are copied to the host (--host-copies auto): tries each kind on the card."""

import logging
import statistics
import threading
import time
from collections.abc import Callable

import torch

from config.errors import ConfigError
from config.execution import BLOCKING_COPIES, DEFAULT_COPIES, SIDE_COPIES
from hpu.backends.gaudi_copies import HostCopies

logger = logging.getLogger(__name__)

PREFERRED = (SIDE_COPIES, DEFAULT_COPIES, BLOCKING_COPIES)
"""Kinds of copies, in decreasing order of overlap with launches."""
WATCHDOG_S = 5.0
"""Seconds after which a trial fails: a copy has been seen to hang inside the runtime."""
STEPS = 9
"""Copies per trial."""
WIDTH = 256
"""Elements per copy: the number of tokens of a large decode."""
SLOW_S = 1e-3
SLOW_FACTOR = 4.0
"""A kind is not chosen if its median copy blocks the launching thread for more than SLOW_S and for
more than SLOW_FACTOR times the median of the fastest kind."""


class CopyTrials:
    """Selects a kind of host copies by trying each kind. `make_copies` makes HostCopies of a kind;
    `launch_work` launches the work that was submitted so far; `choose_default_stream` makes the
    default stream the current stream."""

    def __init__(
        self,
        make_copies: Callable[[str], HostCopies],
        launch_work: Callable[[], None],
        choose_default_stream: Callable[[], None],
    ) -> None:
        self._make_copies = make_copies
        self._launch_work = launch_work
        self._choose_default_stream = choose_default_stream

    def choose(self) -> str:
        """Try each kind, the safest first. Returns the first kind of PREFERRED that copies correct
        values in time and is not slow. Raises ConfigError if no kind works, or if the selected kind
        fails when it is tried again."""
        seconds: dict[str, float] = {}
        failures: dict[str, str] = {}
        for kind in reversed(PREFERRED):
            self._try(kind, seconds, failures)
        fast = [kind for kind in PREFERRED if kind in seconds and not _is_slow(kind, seconds)]
        chosen = fast[0] if fast else ""
        if failures and chosen:
            # Try again: a hanging copy of another kind may block this kind.
            self._try(chosen, seconds, failures)
        if not chosen or chosen in failures:
            reasons = [f"{kind}: {why}" for kind, why in failures.items()]
            raise ConfigError(
                f"no results can be copied from the card: {'; '.join(reasons)}; start again with "
                "--host-copies blocking"
            )
        shown = ", ".join(
            f"{kind} {seconds[kind] * 1e6:.0f} us" for kind in PREFERRED if kind in seconds
        )
        logger.info("Copies to the host: %s (delay of a launch by a copy: %s)", chosen, shown)
        for kind, why in failures.items():
            logger.warning("Copies to the host: %s is not used: %s", kind, why)
        return chosen

    def _try(self, kind: str, seconds: dict[str, float], failures: dict[str, str]) -> None:
        """Try `kind` on a separate thread for at most WATCHDOG_S, and record the median seconds or
        the failure."""
        found: list[float | str] = []

        def run() -> None:
            try:
                with torch.inference_mode():
                    found.append(self._measure(kind))
            except RuntimeError as error:
                found.append(str(error))

        # A hanging copy cannot be cancelled: its thread ends with the process.
        thread = threading.Thread(target=run, name=f"copies-{kind}", daemon=True)
        thread.start()
        thread.join(WATCHDOG_S)
        if not found:
            # In lazy mode the runtime remembers the stream that any thread has set last
            # (HabanaAI/gaudi-pytorch-bridge, torch/hpu/streams.py). Events and graphs of all
            # threads would use the stream of the hanging copy.
            self._choose_default_stream()
        result = found[0] if found else f"no result after {WATCHDOG_S:.0f} s"
        if isinstance(result, str):
            failures[kind] = result
            seconds.pop(kind, None)
        else:
            seconds[kind] = result

    def _measure(self, kind: str) -> float:
        """Median seconds for which a copy blocks the thread that launches. Raises RuntimeError for
        wrong or late values."""
        copies = self._make_copies(kind)
        state = torch.zeros(WIDTH, dtype=torch.int32).to("hpu")
        held = []
        for number in range(1, STEPS + 1):
            state = state + 1
            self._launch_work()
            start = time.perf_counter()
            target = copies.start(state)
            held.append(time.perf_counter() - start)
            copies.event().wait()
            if copies.num_repeated:
                raise RuntimeError("a copy had not arrived after its event")
            if target.tolist() != [number] * WIDTH:
                raise RuntimeError(f"copied {target[0].item()} instead of {number}")
        return statistics.median(held)


def _is_slow(kind: str, seconds: dict[str, float]) -> bool:
    return seconds[kind] > max(SLOW_S, SLOW_FACTOR * min(seconds.values()))
