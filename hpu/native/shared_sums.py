"""SharedSums: shared memory for the all-reduce of ranks on the same host."""

import ctypes
import logging
import mmap
import os
import secrets
from contextlib import suppress

from config.errors import EngineDied
from hpu.distributed.agreement import Agreement
from hpu.distributed.process_groups import ProcessGroup

logger = logging.getLogger(__name__)

STATE_BYTES = 64
"""Bytes per rank of `RankState` in hpu/native/ranks.h."""
SLOTS = 2
NUMBER_BYTES = 4
TOKEN_BYTES = 16
"""Size of the random token at the end of the memory, which proves that a rank opened the right
file."""


class GroupStructure(ctypes.Structure):
    """A group of ranks: `Group` in hpu/native/ranks.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rank", "size", "capacity")),
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("meetings", "lost")),
    )


class SharedSums:
    """Shared memory of the ranks of `group`. All ranks must call the methods in the same order."""

    def __init__(self, group: ProcessGroup) -> None:
        self._agreement = Agreement(group)
        self._group = group
        self._memory: mmap.mmap | None = None
        self.structure = GroupStructure(group.rank, group.size, 0, None, 0, 0)

    def reserve(self, count: int) -> bool:
        """Grow the memory to sums of `count` elements; `count` is equal on all ranks. False if the
        ranks cannot share memory, for example because they are on several hosts."""
        if count <= self.structure.capacity:
            return True
        capacity = -(-count // 16) * 16
        state_bytes = self._group.size * STATE_BYTES
        token_at = state_bytes + self._group.size * SLOTS * capacity * NUMBER_BYTES
        memory = self._open(token_at)
        if memory is None:
            return False
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        process = ctypes.c_int64.from_address(address + self._group.rank * STATE_BYTES + 8)
        process.value = os.getpid()
        # Wait until every rank has written its process id, which waiting ranks check.
        self._agreement.all_true(True)
        self._memory = memory
        self.structure.memory, self.structure.capacity = address, capacity
        self.structure.meetings = 0
        return True

    def check(self) -> None:
        """Raise EngineDied if another rank ended during the last call."""
        if self.structure.lost:
            raise EngineDied(f"rank {self.structure.lost - 1} has ended in a step")

    def _open(self, token_at: int) -> mmap.mmap | None:
        """Map memory of `token_at` bytes and a token; None if a rank cannot map it. The first rank
        creates an anonymous file, which the kernel frees when the processes end."""
        memory, descriptor, token = None, -1, b""
        if self._agreement.is_first:
            token = secrets.token_bytes(TOKEN_BYTES)
            with suppress(OSError, AttributeError):
                descriptor = os.memfd_create("gaudiserve-sums")
                os.ftruncate(descriptor, token_at + TOKEN_BYTES)
                memory = mmap.mmap(descriptor, token_at + TOKEN_BYTES)
                memory[token_at:] = token
        path = f"/proc/{os.getpid()}/fd/{descriptor}".encode()
        told = self._agreement.of_first(token + path)
        if not self._agreement.is_first:
            token = told[:TOKEN_BYTES]
            with suppress(OSError, ValueError):
                descriptor = os.open(told[TOKEN_BYTES:].decode(), os.O_RDWR)
                memory = mmap.mmap(descriptor, token_at + TOKEN_BYTES)
        is_right = memory is not None and memory[token_at:] == token
        all_have_it = self._agreement.all_true(is_right)
        if descriptor >= 0:
            os.close(descriptor)
        return memory if all_have_it else None
