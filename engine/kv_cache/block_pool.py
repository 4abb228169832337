"""KV blocks: who holds them, and which may be evicted. Knows nothing of requests or tensors."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappop, heappush
from itertools import islice


class BlockPool:
    """Lends KV blocks by number.

    Every block is either free or held, and `free + held == size` at all times. Free blocks keep
    their contents until they are lent again, so a prefix may come back. Taking, returning, holding
    and filing one block are all O(1); with `lowest_first` taking and returning are O(log n).

    `lowest_first`: what cannot come back is lent in the order of its numbers, so that the blocks
    in use lie as low as they can: no number passes the most blocks that were ever held at once.
    """

    def __init__(self, size: int, *, lowest_first: bool = False) -> None:
        self.size = size
        self._holders = [0] * size
        self._hash_of: list[bytes | None] = [None] * size
        self._filed: dict[bytes, int] = {}
        # Two free lists: what cannot come back is lent first, then what was used least recently.
        self._plain: deque[int] | list[int]
        self._take_plain: Callable[[], int]
        self._add_plain: Callable[[int], None]
        if lowest_first:
            self._plain = list(range(size))
            self._take_plain = partial(heappop, self._plain)
            self._add_plain = partial(heappush, self._plain)
        else:
            self._plain = deque(range(size))
            self._take_plain = self._plain.popleft
            self._add_plain = self._plain.append
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that nobody holds, filed ones included."""
        return len(self._plain) + len(self._cached)

    def take(self, count: int) -> list[int]:
        """Lend `count` blocks, which the caller has seen to be free; contents and hash are gone."""
        assert count <= self.free, f"{count} blocks wanted, {self.free} are free"
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._plain:
            block = self._take_plain()
        else:
            block, _ = self._cached.popitem(last=False)
            name = self._hash_of[block]
            assert name is not None, f"block {block} lies among the filed ones without a hash"
            del self._filed[name]
            self._hash_of[block] = None
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Add a holder to a filed block; a free one is revived with its contents."""
        if self._holders[block] == 0:
            del self._cached[block]
        self._holders[block] += 1

    def is_free(self, block: int) -> bool:
        return self._holders[block] == 0

    def give_back(self, blocks: Iterable[int]) -> None:
        """End one holding of each block. What is given first is evicted first: give tails first."""
        for block in blocks:
            left = self._holders[block] - 1
            assert left >= 0, f"block {block} is given back, and nobody holds it"
            self._holders[block] = left
            if left == 0:
                if self._hash_of[block] is None:
                    self._add_plain(block)
                else:
                    self._cached[block] = None

    def pack(self, most: int) -> list[tuple[int, int]]:
        """Lend low blocks in place of the highest held ones, `most` at most: (held, lent) pairs.

        The held ones come back, so that whoever names one must name the lent one instead, and have
        its contents there. Only of a pool that lends the lowest first, where nothing is filed.
        """
        held = self.size - self.free
        # Packed, the held blocks are 0 .. held - 1: as many lie above as are free below.
        above = (block for block in range(self.size - 1, held - 1, -1) if self._holders[block])
        high = list(islice(above, most))
        low = self.take(len(high))
        self.give_back(high)
        return list(zip(high, low, strict=True))

    def file(self, block: int, name: bytes) -> bool:
        """Let a full, held block be found by its hash; False if another has the same contents."""
        if name in self._filed:
            return False
        assert self._holders[block] > 0, f"block {block} is filed, and nobody holds it"
        assert self._hash_of[block] is None, f"block {block} is filed twice"
        self._filed[name] = block
        self._hash_of[block] = name
        return True

    def unfile(self, block: int) -> None:
        """Make a held block's contents impossible to find; fine if it was not filed."""
        assert self._holders[block] > 0, f"block {block} is unfiled, and nobody holds it"
        name = self._hash_of[block]
        if name is not None:
            del self._filed[name]
            self._hash_of[block] = None

    def find(self, name: bytes) -> int | None:
        """The block with these contents, held or free."""
        return self._filed.get(name)

    def forget(self) -> None:
        """Drop all hashes; nothing is found until it is filed anew."""
        self._filed.clear()
        self._hash_of = [None] * self.size
        for block in self._cached:
            self._add_plain(block)
        self._cached.clear()

    def check(self, tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless the books agree with the tables of all holders."""
        holders = [0] * self.size
        for table in tables:
            assert len(set(table)) == len(table), f"a table names a block twice: {table}"
            for block in table:
                holders[block] += 1
        for block, count in enumerate(holders):
            assert count == self._holders[block], (
                f"block {block} has {self._holders[block]} holders, {count} tables name it"
            )
        held = sum(1 for count in holders if count)
        assert self.free + held == self.size, (
            f"{self.free} free and {held} held blocks, {self.size} in all"
        )
        plain, cached = set(self._plain), set(self._cached)
        assert len(plain) == len(self._plain) and not plain & cached, "a block is free twice"
        for block in range(self.size):
            name = self._hash_of[block]
            expected = (holders[block] == 0 and name is None, holders[block] == 0 and bool(name))
            assert (block in plain, block in cached) == expected, (
                f"block {block} with {holders[block]} holders lies in the wrong free list"
            )
            assert name is None or self._filed.get(name) == block, f"block {block} is filed wrongly"
        filed = sum(1 for name in self._hash_of if name is not None)
        assert filed == len(self._filed), f"{len(self._filed)} hashes for {filed} filed blocks"
