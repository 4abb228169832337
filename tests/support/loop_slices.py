"""Slices of a live API server's event loop: CPU time of its process during which no other task
ran."""

from pathlib import Path


class LoopSlices:
    """Slices of a server that was started with `env`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "slices"
        self.env = {
            "PYTHONPATH": str(Path(__file__).parent / "loop_watch"),
            "LOOP_SLICES": str(self._file),
        }

    def longest_s(self, since_s: float) -> float:
        """The longest slice that ended after `since_s` of time.monotonic(); 0 if no slice took more
        than 5 ms."""
        assert self._file.exists(), "the server does not measure its event loop"
        slices = [tuple(map(float, line.split())) for line in self._file.read_text().splitlines()]
        return max((cpu_s for ended_s, cpu_s in slices if ended_s > since_s), default=0.0)
