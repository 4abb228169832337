"""KVOffload: plans copies of KV blocks between the device, host memory and files."""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice

from engine.kv_cache.copy_rates import CopyRates
from engine.kv_cache.offload_index import OffloadIndex
from hpu.protocol import (
    HASH_BYTES,
    NO_OFFLOAD,
    BlocksFetched,
    DropFiles,
    FetchBlocks,
    OffloadFacts,
    StepPlan,
    ToWorker,
)

FETCH_SHARE = 2
"""At most 1/FETCH_SHARE of the slots are reserved for blocks that are being read from files."""


class KVOffload:
    """Decides which blocks are copied to the host and back. Copies are part of the next plan; file
    reads run concurrently with plans, into slots that no plan submitted during the read uses.

    With NO_OFFLOAD, no block is stored or found. `only_preempted`: offload only blocks of preempted
    requests.
    """

    def __init__(
        self, facts: OffloadFacts, block_size: int, *, only_preempted: bool = False
    ) -> None:
        self.is_enabled = facts != NO_OFFLOAD
        self._only_preempted = only_preempted
        self._block_size = block_size
        self._counts: Counter[str] = Counter()
        self.version = 0
        """Incremented when a request that waits for files may be able to start."""
        self._start(facts)

    def _start(self, facts: OffloadFacts) -> None:
        raw = facts.file_hashes
        hashes = [raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES)]
        self._index = OffloadIndex(facts.num_slots, facts.max_files, hashes)
        self.rates = CopyRates(self._block_size, facts.load_s)
        self._block_bytes = facts.block_bytes
        self._stores: list[tuple[int, int, bytes]] = []
        """(block, slot, hash) copies to the host in the next plan."""
        self._loads: list[tuple[int, int, bytes]] = []
        """(slot, block, hash) copies to the device in the next plan."""
        self._loading: dict[int, list[tuple[int, bytes]]] = {}
        """Copies to the device in flight: step to (block, hash) pairs."""
        self._preempted: Counter[bytes] = Counter()
        """Block hashes of waiting preempted requests, with the number of such requests."""
        self._preempted_requests: dict[int, list[bytes]] = {}
        self._fetching: dict[bytes, int] = {}
        """Blocks that are being read from files, and their slots."""
        self._fetches: list[FetchBlocks] = []
        """Reads that are not yet sent to the workers."""
        self._sent: deque[tuple[FetchBlocks, bool]] = deque()
        """(read, whether its blocks are still valid) of sent reads, which are answered in this
        order. `reset` invalidates reads."""
        self._has_fetched: set[int] = set()
        """Waiting requests for which files were read. Each request reads once, since its blocks can
        be evicted from host memory again before it starts."""

    def restart(self, facts: OffloadFacts) -> None:
        """Start over with the host memory and files that the workers report after a wake-up."""
        assert not self.num_fetching, f"{self.num_fetching} blocks are being read from files"
        dropped = self._index.take_dropped_files()
        self._start(facts)
        # Files that were dropped while the workers were asleep.
        for block_hash in dropped:
            self._index.drop_file(block_hash)

    @property
    def num_fetching(self) -> int:
        """Number of file reads that are queued or not yet answered."""
        return len(self._sent) + len(self._fetches)

    def evicted(self, block: int, block_hash: bytes) -> None:
        """Schedule a copy to the host of a block that is being reallocated. Does nothing if the
        host has the block or no slot can be freed, or if only blocks of preempted requests are
        offloaded and the block is not one of them."""
        if self._only_preempted and block_hash not in self._preempted:
            return
        slot = self._index.store(block_hash)
        if slot is not None:
            self._stores.append((block, slot, block_hash))

    def holds(self, block_hash: bytes) -> bool:
        """Whether the block is in host memory and copying it is faster than computing it."""
        return self._index.slot(block_hash) is not None and self.rates.loads

    def pin(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Pin blocks that the next plan loads; returns their slots."""
        return [self._index.use(block_hash) for block_hash in block_hashes]

    def load(self, slots: Sequence[int], blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Schedule copies of pinned `slots`, which hold the blocks of `hashes`, to `blocks` in the
        next plan."""
        self._loads.extend(zip(slots, blocks, hashes, strict=True))

    def on_loaded(self, step: int, corrupt: Sequence[int]) -> list[tuple[int, bytes]]:
        """Finish a plan's copies to the device; returns (block, hash) of each corrupt copy."""
        loaded = self._loading.pop(step, [])
        self._counts["corrupt"] += len(corrupt)
        return [loaded[index] for index in corrupt]

    def must_wait(self, key: int, block_hashes: Sequence[bytes], num_found: int) -> bool:
        """Whether request `key` waits for file reads of blocks after its first `num_found` blocks.
        Starts these reads, at most once per request."""
        if num_found < len(block_hashes) and block_hashes[num_found] in self._fetching:
            return True
        if key in self._has_fetched or not self._index.num_files or not self.rates.fetches:
            return False
        # Touch the found blocks: reserving slots below must not evict them.
        num_held = sum(
            self._index.touch(block_hash) for block_hash in islice(block_hashes, num_found)
        )
        num_slots = self._index.num_slots
        room = min(num_slots // FETCH_SHARE, num_slots - num_held) - len(self._fetching)
        slots, hashes = [], []
        for block_hash in islice(block_hashes, num_found, num_found + max(room, 0)):
            if block_hash in self._fetching or not self._index.has_file(block_hash):
                break
            if self._index.slot(block_hash) is not None:
                break
            slot = self._index.reserve()
            if slot is None:
                break
            slots.append(slot)
            hashes.append(block_hash)
        if not hashes:
            return False
        self._has_fetched.add(key)
        self._fetching.update(zip(hashes, slots, strict=True))
        self._fetches.append(FetchBlocks(hashes, slots))
        return True

    def take_messages(self) -> list[ToWorker]:
        """File deletions and file reads to send now. Slots of the reads may still be referenced by
        earlier plans, never by later plans."""
        messages: list[ToWorker] = []
        if dropped := self._index.take_dropped_files():
            messages.append(DropFiles(dropped))
        if self._fetches:
            assert not self._stores and not self._loads, "copies wait for a plan"
            messages += self._fetches
            self._sent.extend((fetch, True) for fetch in self._fetches)
            self._fetches = []
        return messages

    def on_fetched(self, answer: BlocksFetched) -> None:
        """Handle the answer to the oldest read. Blocks that could not be read are recomputed."""
        fetch, is_valid = self._sent.popleft()
        self.version += 1
        failed = {*answer.missing, *answer.corrupt}
        num_read = len(fetch.hashes) - len(failed)
        for index, (block_hash, slot) in enumerate(zip(fetch.hashes, fetch.slots, strict=True)):
            if is_valid:
                del self._fetching[block_hash]
            if index in failed:
                self._index.drop_file(block_hash)
            if index in failed or not is_valid or self._index.slot(block_hash) is not None:
                self._index.release(slot)
            else:
                self._index.fill(slot, block_hash)
        self._counts["fetched"] += num_read
        self._counts["corrupt"] += len(answer.corrupt)
        self._counts["missing"] += len(answer.missing)
        self.rates.add_fetch(len(fetch.hashes), answer.seconds)

    def preempted(self, key: int, block_hashes: Sequence[bytes]) -> None:
        """With `only_preempted`, record the full blocks of a preempted request, which waits
        again."""
        if self._only_preempted:
            self._preempted_requests[key] = list(block_hashes)
            self._preempted.update(block_hashes)

    def started(self, key: int) -> None:
        """Record that a waiting request has started or was dropped."""
        self._has_fetched.discard(key)
        for block_hash in self._preempted_requests.pop(key, ()):
            self._preempted[block_hash] -= 1
            if not self._preempted[block_hash]:
                del self._preempted[block_hash]

    def drop(self, block_hash: bytes) -> None:
        """Drop a corrupt block from host memory and files."""
        self._index.drop(block_hash)

    def fill_plan(self, plan: StepPlan) -> None:
        """Add the pending copies to a plan."""
        stores, loads = self._stores, self._loads
        if stores:
            plan.stored_blocks = [block for block, _, _ in stores]
            plan.stored_slots = [slot for _, slot, _ in stores]
            if self._index.max_files:
                plan.stored_hashes = [block_hash for _, _, block_hash in stores]
            self._counts["stored"] += len(stores)
            self._stores = []
        if loads:
            plan.loaded_slots = [slot for slot, _, _ in loads]
            plan.loaded_blocks = [block for _, block, _ in loads]
            self._loading[plan.step] = [(block, block_hash) for _, block, block_hash in loads]
            self._counts["loaded"] += len(loads)
            self._loads = []
            self._index.unpin_all()

    def reset(self, *, drops_files: bool) -> None:
        """Drop all blocks in host memory. `drops_files`: also drop all blocks in files."""
        assert not self._stores and not self._loads, "copies wait for a plan"
        self.version += 1
        self._index.reset_host()
        self._sent = deque((fetch, False) for fetch, _ in self._sent)
        for fetch in self._fetches:
            for slot in fetch.slots:
                self._index.release(slot)
        self._fetches.clear()
        self._fetching.clear()
        if drops_files:
            self._index.reset_files()

    @property
    def gauges(self) -> dict[str, int]:
        """EngineStats.kv_offload: counts since the start, and current blocks in host memory and
        files; empty without offloading."""
        if not self.is_enabled:
            return {}
        index = self._index
        return {
            **{name: self._counts[name] for name in COUNTS},
            "host_blocks": index.num_stored,
            "max_host_blocks": index.num_slots,
            "file_blocks": index.num_files,
            "max_file_blocks": index.max_files,
            "block_bytes": self._block_bytes,
        }

    def check(self) -> None:
        """Raise AssertionError unless every slot is accounted for."""
        waiting = (*self._fetches, *(fetch for fetch, _ in self._sent))
        self._index.check(sum(len(fetch.slots) for fetch in waiting))


COUNTS = ("stored", "loaded", "fetched", "corrupt", "missing")
"""Block counters: copied to the host, copied to the device, read from files, found with a wrong
checksum (host or file), and without their file."""
