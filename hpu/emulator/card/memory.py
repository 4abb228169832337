"""A card's memory: one pool for storages, graphs and workspace, with its peak."""

from hpu.emulator.settings import EmulatorConfig

ALIGNMENT = {"gaudi2": 128, "gaudi3": 256}
"""Each storage takes a multiple of this many bytes, by generation (the bridge's device_memory.cpp;
the number is from the HAL of HabanaAI/SynapseAI_Core)."""


class Allocation:
    """Device bytes, in use as long as this object lives; views share the allocation of their base.
    `last_write`: StreamClock time of the last write, by the stream with the key `last_writer`;
    `last_reads`: time of the last read by the key of its stream; `last_launch`: number of the last
    launch that read or wrote the bytes, also by a view alone; `read_by` and `written_by`: number of
    the last launch of collected ops, other than views, that read or wrote the bytes."""

    __slots__ = (
        *("__weakref__", "memory", "size"),
        *("last_launch", "last_reads", "last_write", "last_writer", "read_by", "written_by"),
    )

    def __init__(self, memory: "Memory", size: int) -> None:
        self.memory = memory
        self.size = size
        self.last_write = 0
        self.last_writer = 0
        self.last_reads: dict[int, int] = {}
        self.last_launch = 0
        self.read_by = 0
        self.written_by = 0

    def __del__(self) -> None:
        self.memory.free(self.size)


class Memory:
    """`in_use` = live storages + graphs + the largest workspace of all recipes.

    An allocation that does not fit raises RuntimeError and changes nothing.
    """

    def __init__(self, config: EmulatorConfig) -> None:
        self.limit = config.limit_bytes
        self._alignment = ALIGNMENT[config.generation]
        self._says_so = "out-of-memory" not in config.faults
        self.in_use = 0
        self.peak = 0
        self.workspace = 0
        self.num_allocs = 0
        self.num_frees = 0
        self.total_allocs = 0
        self.total_frees = 0
        self.largest = 0

    def allocate(self, size: int) -> Allocation:
        """A storage of `size` bytes, rounded up to the alignment."""
        size = -(-size // self._alignment) * self._alignment
        if self.in_use + size > self.limit:
            if not self._says_so:
                raise RuntimeError("synStatus=26 [Generic failure] while the launch was enqueued")
            raise RuntimeError(
                f"FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::{size} "
                f"({size / (1 << 20):.2f} MB): {self.limit - self.in_use} of {self.limit} bytes "
                "are free"
            )
        self.num_allocs += 1
        self.total_allocs += 1
        self._add(size)
        return Allocation(self, size)

    def reserve_workspace(self, size: int) -> None:
        """Grow the shared workspace to `size`; it never shrinks."""
        growth = size - self.workspace
        if growth <= 0:
            return
        if self.in_use + growth > self.limit:
            raise RuntimeError(
                f"FATAL ERROR :: MODULE:PT_DEVMEM workspace Allocation of size ::{size} failed! "
                f"{self.limit - self.in_use} of {self.limit} bytes are free"
            )
        self.workspace = size
        self._add(growth)

    def free(self, size: int) -> None:
        self.in_use -= size
        self.num_frees += 1
        self.total_frees += 1

    def stats(self) -> dict[str, int]:
        """The runtime's dictionary, in its order (get_mem_stats in the bridge's bindings.cpp)."""
        return {
            "Limit": self.limit,
            "InUse": self.in_use,
            "MaxInUse": self.peak,
            "NumAllocs": self.num_allocs,
            "NumFrees": self.num_frees,
            "ActiveAllocs": self.num_allocs - self.num_frees,
            "MaxAllocSize": self.largest,
            "TotalSystemAllocs": self.total_allocs,
            "TotalSystemFrees": self.total_frees,
            "TotalActiveAllocs": self.total_allocs - self.total_frees,
        }

    def reset_peak(self) -> None:
        """Set the peak to 0: the next allocation sets it to the memory in use
        (reset_peak_mem_stats in the bridge's CoalescedStringentPoolAllocator.cpp)."""
        self.peak = 0

    def reset_counts(self) -> None:
        """Set the counts, but not the totals, to 0, and the peak to the memory in use. ActiveAllocs
        starts at 0 too, so it becomes negative when earlier allocations are freed (clear_stats in
        the bridge's CoalescedStringentPoolAllocator.cpp)."""
        self.num_allocs = self.num_frees = self.largest = 0
        self.peak = self.in_use

    def _add(self, size: int) -> None:
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        self.largest = max(self.largest, size)
