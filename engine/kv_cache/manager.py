"""Who holds which KV blocks, and which prefixes are found again. Knows no rows and no steps."""

from collections.abc import Iterable

from engine.core.request import NEVER, Request
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_hashes import chain, root_hash

MOST_MOVES = 512
"""Blocks that are moved in one step at most."""


class KVCacheManager:
    """Lends blocks to requests as they grow, and files full ones under their hashes.

    A table only grows, until `release` empties it. A block is filed when all of its tokens are
    accepted and written, so what is found may be read at once.

    `contiguous`: decodes read the cache as one slice from block 0 on, so blocks are lent from the
    lowest number on. A block has one holder then: no prefix is shared.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool, contiguous: bool = False
    ) -> None:
        assert not (contiguous and prefix_caching), "a slice of the cache holds no shared blocks"
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.contiguous = contiguous
        self.pool = BlockPool(num_blocks, lowest_first=contiguous)
        self._coming: dict[bytes, Request] = {}
        """Blocks of prompts that are being computed, not filed yet, and by whom."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """The blocks of its longest known prefix, which someone may hold or not.

        At least one known token is left to compute, and every prompt position whose
        log-probability is still owed.
        """
        found: list[int] = []
        for name in request.hashes[: self._most_found(request)]:
            block = self.pool.find(name)
            if block is None:
                break
            found.append(block)
        return found

    def _most_found(self, request: Request) -> int:
        """Blocks that it may find at most."""
        if not self.prefix_caching:
            return 0
        most = request.known - 1
        if request.wants_scores:
            most = min(most, request.num_scored)
        return most // self.block_size

    def pays_to_wait(self, request: Request, prefix: list[int]) -> bool:
        """Whether somebody is computing at least half of what it would have to compute behind
        `prefix` (the same prompt asked for n choices, say)."""
        num_coming = 0
        for name in request.hashes[len(prefix) : self._most_found(request)]:
            if name not in self._coming:
                break
            num_coming += 1
        if not num_coming:
            return False
        left = request.known - len(prefix) * self.block_size
        return 2 * num_coming * self.block_size >= left

    def cost(self, request: Request, prefix: list[int]) -> int:
        """Free blocks it takes to hold all known tokens of a request that found `prefix`."""
        revived = sum(1 for block in prefix if self.pool.is_free(block))
        return self.blocks_for(request.known) - len(prefix) + revived

    def start(self, request: Request, prefix: list[int]) -> None:
        """Give an empty table its prefix; counts its tokens as computed."""
        assert not request.blocks, f"{request.key} starts with {len(request.blocks)} blocks"
        for block in prefix:
            self.pool.hold(block)
        request.blocks = prefix
        request.computed = request.written = len(prefix) * self.block_size
        if self.prefix_caching:
            request.file_at = request.computed + self.block_size
            request.promised = request.hashes[len(prefix) :]
            for name in request.promised:
                self._coming.setdefault(name, request)

    def grow(self, request: Request, count: int) -> list[int]:
        """Lend `count` more blocks, which the caller has seen to be free."""
        taken = self.pool.take(count)
        request.blocks.extend(taken)
        if self.contiguous and taken:
            # Lent in rising order.
            request.reach = max(request.reach, taken[-1] + 1)
        room = len(request.blocks) * self.block_size
        request.pause_at = min(room, request.max_known - 1)
        return taken

    def decode_blocks(self, request: Request) -> int:
        """Blocks that a decode of it alone reads."""
        return request.reach if self.contiguous else len(request.blocks)

    def pack(self, holders: Iterable[Request], slack: int) -> list[tuple[int, int]]:
        """Move the highest blocks of `holders`, who are all that hold any, down to free ones, if
        more than `slack` blocks lie unused below the highest: (from, to) pairs, most often none.

        The tables name the new ones at once; the contents have to follow before anybody reads or
        writes them, and before the old ones, which are free now, are written.
        """
        holders = list(holders)
        reach = max((request.reach for request in holders), default=0)
        if reach - slack <= self.pool.size - self.pool.free:
            return []
        moves = self.pool.pack(MOST_MOVES)
        new = dict(moves)
        for request in holders:
            request.blocks = [new.get(block, block) for block in request.blocks]
            request.reach = max(request.blocks, default=-1) + 1
        return moves

    def file(self, request: Request, written: int) -> None:
        """File the blocks that are full now that `written` known tokens are in the cache."""
        size = self.block_size
        while request.file_at <= written:
            stop = request.file_at
            index = stop // size - 1
            if index == len(request.hashes):
                parent = (
                    request.hashes[-1]
                    if request.hashes
                    else root_hash(request.cache_salt, request.adapter)
                )
                request.hashes.append(chain(parent, request.token_bytes(stop - size, stop)))
            name = request.hashes[index]
            self.pool.file(request.blocks[index], name)
            self._coming.pop(name, None)
            request.file_at = stop + size

    def distrust(self, request: Request) -> None:
        """Let nobody find what it holds, and file no more of it."""
        request.file_at = NEVER
        for block in request.blocks:
            self.pool.unfile(block)

    def release(self, request: Request) -> None:
        """Take back all its blocks, the tail first, so that a prefix outlives what follows it."""
        for name in request.promised:
            if self._coming.get(name) is request:
                del self._coming[name]
        request.promised = []
        self.pool.give_back(reversed(request.blocks))
        request.blocks = []
        request.computed = request.written = request.pause_at = request.reach = 0
        request.file_at = NEVER

    def forget_prefixes(self, holders: Iterable[Request]) -> None:
        """Drop every hash. Those who hold blocks now file none of them later: what they have
        written belongs to the time before."""
        self.pool.forget()
        self._coming.clear()
        for request in holders:
            request.file_at = NEVER

    def check(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError, with the numbers, unless books and tables agree."""
        holders = list(holders)
        self.pool.check(request.blocks for request in holders)
        strays = {request.key for request in self._coming.values() if request not in holders}
        assert not strays, f"{strays} are said to compute blocks, and hold none"
        for request in holders:
            need = self.blocks_for(request.computed)
            assert len(request.blocks) == need, (
                f"{request.key} holds {len(request.blocks)} blocks, its {request.computed} "
                f"computed tokens need {need}"
            )
            reach = max(request.blocks, default=-1) + 1
            assert not self.contiguous or request.reach == reach, (
                f"{request.key} holds block {reach - 1}, its reach is {request.reach}"
            )
