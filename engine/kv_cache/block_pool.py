"""Pool of KV-cache blocks with reference counts and LRU eviction."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappop, heappush
from itertools import islice


class BlockPool:
    """Allocates KV-cache blocks by id.

    Every block is either free or referenced: `num_free + num_used == size` at all times. Free
    blocks keep their contents until they are reallocated, so a cached prefix can be reused. Every
    operation on a single block is O(1); with `lowest_first`, allocating and freeing are O(log n).

    `lowest_first`: allocate blocks without a hash by lowest id, so that no id exceeds the peak
    number of used blocks.
    """

    def __init__(self, size: int, *, lowest_first: bool = False) -> None:
        self.size = size
        self.on_evict: Callable[[int, bytes], None] | None = None
        """Called with a cached block and its hash when the block is reallocated. The contents stay
        on the device until the next plan runs."""
        self._ref_count = [0] * size
        self._hash_of: list[bytes | None] = [None] * size
        self._cached_blocks: dict[bytes, int] = {}
        # Two free lists: blocks without a hash are allocated first, then the least recently used
        # block with a hash.
        self._free_uncached: deque[int] | list[int]
        self._pop_uncached: Callable[[], int]
        self._push_uncached: Callable[[int], None]
        if lowest_first:
            self._free_uncached = list(range(size))
            self._pop_uncached = partial(heappop, self._free_uncached)
            self._push_uncached = partial(heappush, self._free_uncached)
        else:
            self._free_uncached = deque(range(size))
            self._pop_uncached = self._free_uncached.popleft
            self._push_uncached = self._free_uncached.append
        self._free_cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks without a reference, including cached blocks."""
        return len(self._free_uncached) + len(self._free_cached)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` free blocks; at least `count` must be free. Their contents and hashes
        are lost."""
        assert count <= self.num_free, f"{count} blocks requested, {self.num_free} are free"
        return [self._allocate_one() for _ in range(count)]

    def _allocate_one(self) -> int:
        if self._free_uncached:
            block = self._pop_uncached()
        else:
            block, _ = self._free_cached.popitem(last=False)
            block_hash = self._hash_of[block]
            assert block_hash is not None, (
                f"block {block} is in the cached free list without a hash"
            )
            del self._cached_blocks[block_hash]
            self._hash_of[block] = None
            if self.on_evict is not None:
                self.on_evict(block, block_hash)
        self._ref_count[block] = 1
        return block

    def touch(self, block: int) -> None:
        """Add a reference to a cached block, whether used or free."""
        if self._ref_count[block] == 0:
            del self._free_cached[block]
        self._ref_count[block] += 1

    def is_free(self, block: int) -> bool:
        return self._ref_count[block] == 0

    def free(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block. Blocks are evicted in the order in which they are freed:
        pass the tail of a block table first."""
        for block in blocks:
            count = self._ref_count[block] - 1
            assert count >= 0, f"block {block} is freed and has no reference"
            self._ref_count[block] = count
            if count == 0:
                if self._hash_of[block] is None:
                    self._push_uncached(block)
                else:
                    self._free_cached[block] = None

    def compact(self, max_moves: int) -> list[tuple[int, int]]:
        """Replace at most `max_moves` of the highest used blocks by low free blocks. Returns
        (from, to) pairs.

        The old blocks are freed; the caller moves contents and block tables. Requires
        `lowest_first` and a pool without cached blocks.
        """
        num_used = self.size - self.num_free
        # After full compaction the used blocks are 0 .. num_used - 1. There are as many used blocks
        # above that range as free blocks inside it.
        above = (
            block for block in range(self.size - 1, num_used - 1, -1) if self._ref_count[block]
        )
        high = list(islice(above, max_moves))
        low = self.allocate(len(high))
        self.free(high)
        return list(zip(high, low, strict=True))

    def cache_block(self, block: int, block_hash: bytes) -> bool:
        """Set the hash of a full, used block; returns False if a block already has this hash."""
        if block_hash in self._cached_blocks:
            return False
        assert self._ref_count[block] > 0, f"block {block} is cached and has no reference"
        assert self._hash_of[block] is None, f"block {block} is cached twice"
        self._cached_blocks[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def evict(self, block: int) -> None:
        """Remove a block's hash, if it has one."""
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._cached_blocks[block_hash]
            self._hash_of[block] = None
            if not self._ref_count[block]:
                del self._free_cached[block]
                self._push_uncached(block)

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """The block with this hash, used or free; None if no block has the hash."""
        return self._cached_blocks.get(block_hash)

    def reset_cache(self) -> None:
        """Drop all hashes."""
        self._cached_blocks.clear()
        self._hash_of = [None] * self.size
        for block in self._free_cached:
            self._push_uncached(block)
        self._free_cached.clear()

    def check(self, tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless reference counts, hashes and free lists agree with the block
        tables of all requests."""
        ref_counts = [0] * self.size
        for table in tables:
            assert len(set(table)) == len(table), f"a table has a block twice: {table}"
            for block in table:
                ref_counts[block] += 1
        for block, count in enumerate(ref_counts):
            assert count == self._ref_count[block], (
                f"block {block} has {self._ref_count[block]} references, it is in {count} tables"
            )
        num_used = sum(1 for count in ref_counts if count)
        assert self.num_free + num_used == self.size, (
            f"{self.num_free} free and {num_used} used blocks, {self.size} in all"
        )
        uncached, cached = set(self._free_uncached), set(self._free_cached)
        is_disjoint = len(uncached) == len(self._free_uncached) and not uncached & cached
        assert is_disjoint, "a block is free twice"
        for block in range(self.size):
            block_hash = self._hash_of[block]
            is_free = ref_counts[block] == 0
            expected = (is_free and block_hash is None, is_free and block_hash is not None)
            assert (block in uncached, block in cached) == expected, (
                f"block {block} with {ref_counts[block]} references is in the wrong free list"
            )
            assert block_hash is None or self._cached_blocks.get(block_hash) == block, (
                f"the hash of block {block} leads to another block"
            )
        num_hashed = sum(1 for block_hash in self._hash_of if block_hash is not None)
        assert num_hashed == len(self._cached_blocks), (
            f"{len(self._cached_blocks)} hashes for {num_hashed} cached blocks"
        )
