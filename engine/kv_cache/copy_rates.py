"""CopyRates: whether a KV block comes to the device sooner by copy or by computing it again."""

DECAY = 0.98
"""What an earlier launch counts at each later one."""


class CopyRates:
    """Measured times. What was not measured yet is taken to be fast, so that it is measured."""

    def __init__(self, block_size: int, load_s: float) -> None:
        """`load_s`: of the copy of one block from host memory."""
        self._block_size = block_size
        self._load_s = load_s
        self._prefill_s = 0.0
        self._prefill_tokens = 0.0
        self._fetch_s = 0.0
        self._fetched_blocks = 0.0

    def add_prefill(self, num_tokens: int, seconds: float) -> None:
        """A prefill launch of so many tokens, without padding."""
        # Sums, not rates: a short prompt in a large bucket counts for little.
        self._prefill_s = self._prefill_s * DECAY + seconds
        self._prefill_tokens = self._prefill_tokens * DECAY + num_tokens

    def add_fetch(self, num_blocks: int, seconds: float) -> None:
        """Blocks that were read from files."""
        self._fetch_s = self._fetch_s * DECAY + seconds
        self._fetched_blocks = self._fetched_blocks * DECAY + num_blocks

    @property
    def compute_s(self) -> float | None:
        """Time in which one block is computed; None: nothing was computed yet."""
        if not self._prefill_tokens:
            return None
        return self._prefill_s / self._prefill_tokens * self._block_size

    @property
    def fetch_s(self) -> float:
        """Time in which one block is read from its file; 0: none was read yet."""
        return self._fetch_s / self._fetched_blocks if self._fetched_blocks else 0.0

    @property
    def loads(self) -> bool:
        """Whether a block in host memory is copied."""
        compute_s = self.compute_s
        return compute_s is None or self._load_s < compute_s

    @property
    def fetches(self) -> bool:
        """Whether a block in a file is read and copied."""
        compute_s = self.compute_s
        return compute_s is None or self.fetch_s + self._load_s < compute_s
