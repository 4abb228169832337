"""LaunchCosts: how long a decode takes, by its number of rows."""

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from hpu.distributed.agreement import ALONE, Agreement

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256)
"""Numbers of rows that are measured; those between them are interpolated. One row more than a full
tile of a matrix unit may cost a fifth of the launch (AMX: 14.6 ms for 32, 17.4 ms for 33)."""
REPEATS = 8
BUDGET_S = 3.0


class LaunchCosts:
    """Seconds of a launch, measured for some numbers of rows, and never less for more of them."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """`rows` rise; at least one."""
        self._rows = list(rows)
        # What disturbs a measurement makes it longer: a launch takes no longer than a larger one.
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
        """For `decoded`: ranks agree on the costs of one of them."""
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
    """Call `launch(rows)`, which returns once it is done, for rising numbers of rows up to
    `max_rows`, and again until `budget_s` has passed; the fastest call for each counts. All ranks
    of `agreement` make the same calls, and get the result of the first one."""
    end_s = time.perf_counter() + budget_s
    fastest: dict[int, float] = {}
    counts = [*(count for count in ROWS if count < max_rows), max_rows]
    # In turns: a disturbance of the machine then does not fall on all calls for one number.
    for turn in range(REPEATS + 1):
        for count in counts:
            start = time.perf_counter()
            launch(count)
            seconds = time.perf_counter() - start
            # The first calls allocate.
            fastest[count] = min(seconds, fastest.get(count, seconds)) if turn > 1 else seconds
            # Two points give the slope for the others.
            if turn == 0 and count > 1 and not agreement.all_true(time.perf_counter() < end_s):
                counts = list(fastest)
                break
        if not agreement.all_true(time.perf_counter() < end_s):
            break
    costs = LaunchCosts(list(fastest), list(fastest.values()))
    return LaunchCosts.decoded(agreement.of_first(costs.encoded()))
