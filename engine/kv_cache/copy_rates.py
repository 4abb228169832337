"""CopyRates: compares the time to copy a KV block to the device with the time to compute it."""

DECAY = 0.98
"""Weight of the previous measurements when a measurement is added."""


class CopyRates:
    """Measured prefill and copy times. A path without measurements counts as fast, so that it is
    tried."""

    def __init__(self, block_size: int, load_s: float) -> None:
        """`load_s`: seconds to copy one block from host memory to the device."""
        self._block_size = block_size
        self._load_s = load_s
        self._prefill_s = 0.0
        self._prefill_tokens = 0.0
        self._fetch_s = 0.0
        self._fetched_blocks = 0.0

    def add_prefill(self, num_tokens: int, seconds: float) -> None:
        """Add a prefill launch of `num_tokens` tokens, padding excluded."""
        # Keep sums instead of averaging rates, so that a short prompt in a large bucket has little
        # weight.
        self._prefill_s = self._prefill_s * DECAY + seconds
        self._prefill_tokens = self._prefill_tokens * DECAY + num_tokens

    def add_fetch(self, num_blocks: int, seconds: float) -> None:
        """Add a read of `num_blocks` blocks from files."""
        self._fetch_s = self._fetch_s * DECAY + seconds
        self._fetched_blocks = self._fetched_blocks * DECAY + num_blocks

    @property
    def compute_s(self) -> float | None:
        """Seconds to compute one block; None before the first prefill."""
        if not self._prefill_tokens:
            return None
        return self._prefill_s / self._prefill_tokens * self._block_size

    @property
    def fetch_s(self) -> float:
        """Seconds to read one block from its file; 0 before the first read."""
        return self._fetch_s / self._fetched_blocks if self._fetched_blocks else 0.0

    @property
    def loads(self) -> bool:
        """Whether a block in host memory is copied rather than recomputed."""
        compute_s = self.compute_s
        return compute_s is None or self._load_s < compute_s

    @property
    def fetches(self) -> bool:
        """Whether a block in a file is read and copied rather than recomputed."""
        compute_s = self.compute_s
        return compute_s is None or self.fetch_s + self._load_s < compute_s
