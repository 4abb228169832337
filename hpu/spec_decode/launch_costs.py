"""LaunchCosts: time of a launch by its number of rows."""

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from hpu.distributed.agreement import ALONE, Agreement

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256)
"""Row counts that are measured; times between them are interpolated. One row more than a full tile
of a matrix unit may add a fifth to the launch time (AMX: 14.6 ms for 32 rows, 17.4 ms for 33)."""
REPEATS = 8
BUDGET_S = 3.0


class LaunchCosts:
    """Seconds of a launch by its number of rows, interpolated and extrapolated from measurements.
    They never decrease with more rows."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """`rows`: ascending, at least one element."""
        self._rows = list(rows)
        # Disturbances only lengthen a measurement, and a launch takes no longer than a larger
        # launch.
        least = list(itertools.accumulate(reversed(seconds), min))
        self._seconds = least[::-1]
        self._memo: dict[int, float] = {}

    def seconds(self, num_rows: int) -> float:
        """Seconds of a launch of `num_rows`."""
        found = self._memo.get(num_rows)
        if found is None:
            found = self._memo[num_rows] = self._interpolated(num_rows)
        return found

    def _interpolated(self, num_rows: int) -> float:
        rows, seconds = self._rows, self._seconds
        if num_rows <= rows[0] or len(rows) == 1:
            return seconds[0] * max(1.0, num_rows / rows[0])
        index = min(bisect_left(rows, num_rows), len(rows) - 1)
        slope = (seconds[index] - seconds[index - 1]) / (rows[index] - rows[index - 1])
        return seconds[index] + slope * (num_rows - rows[index])

    def encoded(self) -> bytes:
        """Encode the costs for `decoded`: all ranks use the costs that the first rank measured."""
        pairs = zip(self._rows, self._seconds, strict=True)
        return " ".join(f"{rows}:{seconds!r}" for rows, seconds in pairs).encode()

    @classmethod
    def decoded(cls, data: bytes) -> "LaunchCosts":
        pairs = [pair.split(":") for pair in data.decode().split()]
        return cls([int(rows) for rows, _ in pairs], [float(seconds) for _, seconds in pairs])


def measure(
    launch: Callable[[int], None],
    max_rows: int,
    agreement: Agreement = ALONE,
    budget_s: float = BUDGET_S,
) -> LaunchCosts:
    """Measure launches: call `launch(rows)`, which returns when the launch is done, for ascending
    row counts up to `max_rows`, and repeat up to REPEATS times within `budget_s` seconds. Uses the
    fastest repetition of each row count. All ranks of `agreement` make the same calls and get the
    result of the first rank."""
    end_s = time.perf_counter() + budget_s
    fastest: dict[int, float] = {}
    counts = [*(count for count in ROWS if count < max_rows), max_rows]
    # Alternate between the row counts, so that a disturbance of the machine does not affect all
    # calls of one row count.
    for turn in range(REPEATS + 1):
        for count in counts:
            start = time.perf_counter()
            launch(count)
            seconds = time.perf_counter() - start
            # The first calls allocate memory: their times are replaced by times of the second turn.
            fastest[count] = min(seconds, fastest.get(count, seconds)) if turn > 1 else seconds
            # If the time is over within the first turn, the larger launches are extrapolated.
            if turn == 0 and count > 1 and not agreement.all_true(time.perf_counter() < end_s):
                counts = list(fastest)
                break
        if not agreement.all_true(time.perf_counter() < end_s):
            break
    costs = LaunchCosts(list(fastest), list(fastest.values()))
    return LaunchCosts.decoded(agreement.of_first(costs.encoded()))
