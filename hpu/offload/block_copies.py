"""Copies KV blocks between a device's caches and slots of host memory. A slot holds the bytes of a
block from all caches, concatenated, in the caches' own formats."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hpu.backends.base import Backend, Event
from hpu.offload.block_files import NoFiles
from hpu.offload.block_lists import BlockLists
from hpu.offload.host_blocks import MAX_GATHERS, HostBlocks, copy_sizes


class Layout(NamedTuple):
    """Layout of a slot: offset and width of each cache's part."""

    offsets: tuple[int, ...]
    widths: tuple[int, ...]
    """Width of each cache's part in bytes."""

    @property
    def slot_bytes(self) -> int:
        return sum(self.widths)


def layout_of(caches: Sequence[Tensor], block_size: int) -> Layout:
    """Layout of a slot for `caches` (blocks * block_size, ...)."""
    widths = tuple(cache[0].numel() * cache.itemsize * block_size for cache in caches)
    return Layout(tuple(sum(widths[:i]) for i in range(len(widths))), widths)


class BlockCopies(Protocol):
    """Copies to and from host memory, in order with the device's work. Each stored slot gets a
    checksum."""

    def store(self, step: int, blocks: list[int], slots: list[int], hashes: list[bytes]) -> None:
        """Copy `blocks` to `slots`, and write them to files named after their `hashes` if there are
        files. If the device has its own memory, the slots may become valid only after `land` of
        this step."""
        ...

    def load(self, slots: list[int], blocks: list[int]) -> None:
        """Copy `slots` to `blocks`, before any work that is launched later. Waits for pending
        copies to these slots."""
        ...

    def land(self, step: int) -> None:
        """Notify that the device has completed all steps up to `step`."""
        ...

    def settle(self, slots: Iterable[int]) -> None:
        """Wait for pending copies to these slots."""
        ...

    def warm_up(self) -> None:
        """Compile all copies and wait for the device. Overwrites the pad block."""
        ...

    def close(self) -> None:
        """Finish the copies of the steps given to `land`, drop the others, and clear the staging
        memory on the host."""
        ...


class DirectCopies:
    """BlockCopies of a device that shares host memory: a copy is complete when the call returns."""

    def __init__(
        self,
        caches: Sequence[Tensor],
        block_size: int,
        memory: HostBlocks,
        files: NoFiles,
    ) -> None:
        self._layout = layout_of(caches, block_size)
        self._caches = [
            cache.view(torch.uint8).view(-1, width)
            for cache, width in zip(caches, self._layout.widths, strict=True)
        ]
        self._pad_block = len(self._caches[0]) - 1
        parts = zip(self._layout.offsets, self._layout.widths, strict=True)
        self._parts = [memory.pool[:, offset : offset + width] for offset, width in parts]
        self._memory = memory
        self._files = files

    def store(self, step: int, blocks: list[int], slots: list[int], hashes: list[bytes]) -> None:
        self._files.release(slots)
        for block, slot in zip(blocks, slots, strict=True):
            for cache, part in zip(self._caches, self._parts, strict=True):
                part[slot].copy_(cache[block])
        self._memory.seal(slots)
        self._files.write(hashes, slots)

    def load(self, slots: list[int], blocks: list[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            for cache, part in zip(self._caches, self._parts, strict=True):
                cache[block].copy_(part[slot])

    def land(self, step: int) -> None:
        return

    def settle(self, slots: Iterable[int]) -> None:
        return

    def warm_up(self) -> None:
        self.load([0], [self._pad_block])

    def close(self) -> None:
        return


class _PendingStore(NamedTuple):
    """Blocks being copied to the host."""

    step: int
    slots: list[int]
    hashes: list[bytes]
    contents: list[Tensor]
    """Blocks of each cache in host memory; valid once the device has completed the copy."""


class StagedCopies:
    """BlockCopies of a device with its own memory, with static shapes.

    Store: blocks are gathered on the device before the launches of the step and copied to the host
    while the launches run; then a thread copies them to their slots. Load: slots are gathered on
    the host and uploaded while earlier launches run.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        block_size: int,
        memory: HostBlocks,
        files: NoFiles,
        backend: Backend,
    ) -> None:
        self._caches = list(caches)
        self._layout = layout_of(caches, block_size)
        parts = zip(self._layout.offsets, self._layout.widths, strict=True)
        self._parts = [memory.pool[:, offset : offset + width] for offset, width in parts]
        self._memory = memory
        self._pad_block = len(caches[0]) // block_size - 1
        self._block_size = block_size
        self._files = files
        self._backend = backend
        self._offsets = torch.arange(block_size, dtype=backend.index_dtype).to(backend.device)
        sizes = copy_sizes(self._layout.slot_bytes)
        self._store_lists = {size: BlockLists(size, 1, backend) for size in sizes}
        self._load_lists = {size: BlockLists(size, 1, backend) for size in sizes}
        self._staging = {size: self._make_staging(size) for size in sizes}
        self._in_flight: deque[_PendingStore] = deque()
        self._landing: dict[int, Future[None]] = {}
        """Pending copy to each slot."""
        self._thread = ThreadPoolExecutor(1, "kv-offload")

    def _make_staging(self, size: int) -> list[tuple[Tensor, list[Tensor], list[Event | None]]]:
        """For each cache: device memory, two host buffers, and the event of the last upload from
        each."""
        staging: list[tuple[Tensor, list[Tensor], list[Event | None]]] = []
        for cache in self._caches:
            shape = (size * self._block_size, *cache.shape[1:])
            count = size * self._block_size * cache[0].numel()
            hosts = [self._backend.host_tensor(count, cache.dtype).view(shape) for _ in range(2)]
            staging.append((self._backend.zeros(shape, cache.dtype), hosts, [None, None]))
        return staging

    def store(self, step: int, blocks: list[int], slots: list[int], hashes: list[bytes]) -> None:
        for part in _parts(len(blocks), self._store_lists):
            if len(self._in_flight) >= MAX_GATHERS:
                # Limit the memory of gathered blocks on the device.
                self._backend.event().wait()
                self._land_all(lambda copy: True)
            size = _fitting(len(blocks[part]), self._store_lists)
            contents = self._gather(blocks[part], size)
            self._in_flight.append(_PendingStore(step, slots[part], hashes[part], contents))

    def _gather(self, blocks: list[int], size: int) -> list[Tensor]:
        (index,) = self._store_lists[size].upload(blocks, pad_block=self._pad_block)
        index = self._slots(index)
        # One recipe per cache: caches of equal shape share a recipe, which needs memory for a
        # single cache only.
        return [self._backend.to_host(cache.index_select(0, index)) for cache in self._caches]

    def load(self, slots: list[int], blocks: list[int]) -> None:
        self.settle(slots)
        for part in _parts(len(blocks), self._load_lists):
            self._scatter(slots[part], blocks[part])

    def _scatter(self, slots: list[int], blocks: list[int]) -> None:
        size = _fitting(len(blocks), self._load_lists)
        (index,) = self._load_lists[size].upload(blocks, pad_block=self._pad_block)
        index = self._slots(index)
        used = []
        for cache, rows, (device, hosts, read_events) in zip(
            self._caches, self._parts, self._staging[size], strict=True
        ):
            # Alternate between the two host buffers.
            hosts.reverse()
            read_events.reverse()
            read_event = read_events[0]
            if read_event is not None:
                read_event.wait()
            flat = hosts[0].view(torch.uint8).view(size, -1)
            for row, slot in zip(flat, slots, strict=False):
                row.copy_(rows[slot])
            self._backend.upload(device, hosts[0])
            with self._backend.recipe:
                cache.index_copy_(0, index, device)
            used.append(read_events)
        event = self._backend.event()
        for events in used:
            events[0] = event

    def land(self, step: int) -> None:
        self._land_all(lambda copy: copy.step <= step)

    def _land_all(self, is_done: Callable[[_PendingStore], bool]) -> None:
        while self._in_flight and is_done(self._in_flight[0]):
            stored = self._in_flight.popleft()
            future = self._thread.submit(self._bring, stored)
            self._landing = {s: f for s, f in self._landing.items() if not f.done()}
            self._landing.update(dict.fromkeys(stored.slots, future))

    @torch.inference_mode()
    def _bring(self, stored: _PendingStore) -> None:
        self._files.release(stored.slots)
        for contents, rows in zip(stored.contents, self._parts, strict=True):
            flat = contents.view(torch.uint8).view(-1, rows.shape[1])
            for row, slot in zip(flat, stored.slots, strict=False):
                rows[slot].copy_(row)
            flat.zero_()
        self._memory.seal(stored.slots)
        self._files.write(stored.hashes, stored.slots)

    def settle(self, slots: Iterable[int]) -> None:
        slots = set(slots)
        if any(not slots.isdisjoint(copy.slots) for copy in self._in_flight):
            self._backend.event().wait()
            self._land_all(lambda copy: True)
        for slot in slots & self._landing.keys():
            self._landing[slot].result()

    def warm_up(self) -> None:
        for size in self._store_lists:
            self._gather([], size)
            self._scatter([0] * size, [self._pad_block] * size)
        self._backend.synchronize()

    def close(self) -> None:
        # The device may not have completed these copies.
        self._in_flight.clear()
        self._thread.shutdown()
        with torch.inference_mode():
            for staging in self._staging.values():
                for _, hosts, _ in staging:
                    for host in hosts:
                        host.zero_()

    def _slots(self, blocks: Tensor) -> Tensor:
        """Cache slots (n * block_size,) of the tokens in `blocks` (n,)."""
        return (blocks.unsqueeze(1) * self._block_size + self._offsets).view(-1)


def _parts(count: int, sizes: Iterable[int]) -> list[slice]:
    most = max(sizes)
    return [slice(start, start + most) for start in range(0, count, most)]


def _fitting(count: int, sizes: Iterable[int]) -> int:
    return min(size for size in sizes if size >= count)
