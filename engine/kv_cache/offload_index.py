"""OffloadIndex: LRU index of the KV blocks in host memory and in files, by hash."""

from collections import OrderedDict
from collections.abc import Iterable


class OffloadIndex:
    """Tracks at most `num_slots` blocks in host memory and `max_files` blocks in files by hash.
    When a tier is full, its least recently used block is evicted.

    A slot is free, has a hash, or is reserved by the caller. A pinned block is not evicted.
    """

    def __init__(self, num_slots: int, max_files: int, file_hashes: Iterable[bytes] = ()) -> None:
        """`file_hashes`: blocks that are already in files, least recently used first."""
        self.num_slots = num_slots
        self.max_files = max_files
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._pinned: set[bytes] = set()
        self._files: OrderedDict[bytes, None] = OrderedDict.fromkeys(file_hashes)
        self._dropped_files: list[bytes] = []
        self._limit_files()

    @property
    def num_stored(self) -> int:
        """Blocks in host memory."""
        return len(self._slot_of)

    @property
    def num_files(self) -> int:
        return len(self._files)

    def slot(self, block_hash: bytes) -> int | None:
        """Host-memory slot of a block; None if the block is not in host memory."""
        return self._slot_of.get(block_hash)

    def has_file(self, block_hash: bytes) -> bool:
        return block_hash in self._files

    def store(self, block_hash: bytes) -> int | None:
        """Assign a host slot to the block, and register a file if files are used. Returns the slot
        to copy the block to; None if the block already has a slot or no slot can be freed."""
        if block_hash in self._slot_of:
            self._slot_of.move_to_end(block_hash)
            return None
        slot = self.reserve()
        if slot is None:
            return None
        self.fill(slot, block_hash)
        if self.max_files:
            self._files[block_hash] = None
            self._files.move_to_end(block_hash)
            self._limit_files()
        return slot

    def reserve(self) -> int | None:
        """Take a slot for `fill` or `release`; None if all slots are pinned or reserved."""
        if self._free_slots:
            return self._free_slots.pop()
        victim = next(
            (block_hash for block_hash in self._slot_of if block_hash not in self._pinned), None
        )
        return None if victim is None else self._slot_of.pop(victim)

    def fill(self, slot: int, block_hash: bytes) -> None:
        """Assign the block to a reserved slot. The block need not be copied yet."""
        assert block_hash not in self._slot_of, "a block is in host memory twice"
        self._slot_of[block_hash] = slot

    def release(self, slot: int) -> None:
        """Return a reserved slot."""
        self._free_slots.append(slot)

    def use(self, block_hash: bytes) -> int:
        """Slot of a block that is going to be copied to the device. The slot is pinned until
        `unpin_all`."""
        self._slot_of.move_to_end(block_hash)
        self._pinned.add(block_hash)
        if block_hash in self._files:
            self._files.move_to_end(block_hash)
        return self._slot_of[block_hash]

    def touch(self, block_hash: bytes) -> bool:
        """Whether the block is in host memory. If so, marks it as most recently used."""
        if block_hash not in self._slot_of:
            return False
        self._slot_of.move_to_end(block_hash)
        return True

    def unpin_all(self) -> None:
        self._pinned.clear()

    def drop(self, block_hash: bytes) -> None:
        """Drop a block from host memory and files."""
        slot = self._slot_of.pop(block_hash, None)
        if slot is not None:
            self._free_slots.append(slot)
        self.drop_file(block_hash)

    def drop_file(self, block_hash: bytes) -> None:
        if self._files.pop(block_hash, self) is not self:
            self._dropped_files.append(block_hash)

    def reset_host(self) -> None:
        """Drop all blocks in host memory."""
        self._free_slots.extend(self._slot_of.values())
        self._slot_of.clear()
        self._pinned.clear()

    def reset_files(self) -> None:
        """Drop all files."""
        self._dropped_files.extend(self._files)
        self._files.clear()

    def take_dropped_files(self) -> list[bytes]:
        """Take the blocks whose files must be deleted."""
        dropped, self._dropped_files = self._dropped_files, []
        return [path for path in dropped if path not in self._files]

    def check(self, num_reserved: int) -> None:
        """Raise AssertionError unless every slot is free, has one hash, or is reserved."""
        slots = [*self._free_slots, *self._slot_of.values()]
        assert len(set(slots)) == len(slots), f"a slot is used twice: {sorted(slots)}"
        assert len(slots) + num_reserved == self.num_slots, (
            f"{len(self._free_slots)} free, {len(self._slot_of)} used and {num_reserved} reserved "
            f"slots, {self.num_slots} in all"
        )
        assert len(self._files) <= max(self.max_files, 0), (
            f"{len(self._files)} files, at most {self.max_files}"
        )

    def _limit_files(self) -> None:
        while len(self._files) > self.max_files:
            self._dropped_files.append(self._files.popitem(last=False)[0])
