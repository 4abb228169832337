"""KV blocks of requests: allocation, prefix cache, defragmentation."""

from collections.abc import Iterable

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.offload import KVOffload
from engine.kv_cache.prefix_hashes import chain, images_in, root_hash
from engine.request import NEVER, PREEMPTED, Request
from hpu.protocol import NO_OFFLOAD

MAX_MOVES = 512
"""Maximum blocks moved in one step by defragmentation."""

ON_HOST = -1
"""Marker in a prefix: the block is in host memory and is copied when the request starts."""


class KVCacheManager:
    """Allocates blocks to requests as they grow, and caches full blocks under their hashes.

    A block table only grows, until `free` empties it. A computed block is cached once all of its
    tokens are accepted and their KV is written, so a prefix hit can be read at once.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool,
        contiguous: bool = False,
        num_lookahead_tokens: int = 0,
        offload: KVOffload | None = None,
        all_see_images: bool = False,
    ) -> None:
        """`contiguous`: decodes read the cache as a slice that starts at block 0, so the lowest
        blocks are allocated first and blocks are not shared. `num_lookahead_tokens`: KV slots that
        each decode needs beyond its own token, for the plans in flight. `offload`: keeps evicted
        blocks. `all_see_images`: see `block_hashes`."""
        assert not (contiguous and prefix_caching), "a slice of the cache holds no shared blocks"
        self.num_lookahead_tokens = num_lookahead_tokens
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.contiguous = contiguous
        self.pool = BlockPool(num_blocks, lowest_first=contiguous)
        self._all_see_images = all_see_images
        self.offload = KVOffload(NO_OFFLOAD, block_size) if offload is None else offload
        if self.offload.is_enabled:
            assert prefix_caching, "offloaded blocks are found by their prefix hashes"
            self.pool.on_evict = self.offload.evicted
        self._computing: dict[bytes, Request] = {}
        """Blocks that are being computed: hash to the computing request."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks needed for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks of the request's longest cached prefix, used or free; ON_HOST for host blocks.

        The prefix excludes at least the last token, and every prompt position whose log-probability
        is still to be sent: these tokens must be computed.
        """
        prefix: list[int] = []
        for block_hash in request.block_hashes[: self._max_prefix_blocks(request)]:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                if not self.offload.holds(block_hash):
                    break
                block = ON_HOST
            prefix.append(block)
        return prefix

    def prefetch(self, request: Request) -> None:
        """Start to read the request's blocks from files, if reading is faster than computing
        them."""
        if self.offload.is_enabled:
            self.should_wait_for_files(request, self.find_prefix(request))

    def should_wait_for_files(self, request: Request, prefix: list[int]) -> bool:
        """Whether blocks after `prefix` are being read from files. Starts the reads if reading is
        faster."""
        if not self.offload.is_enabled:
            return False
        hashes = request.block_hashes[: self._max_prefix_blocks(request)]
        return self.offload.must_wait(request.key, hashes, len(prefix))

    def _max_prefix_blocks(self, request: Request) -> int:
        if not self.prefix_caching:
            return 0
        max_tokens = request.num_tokens - 1
        if request.needs_prompt_logprobs:
            max_tokens = min(max_tokens, request.num_prompt_logprobs)
        return max_tokens // self.block_size

    def should_wait_for_prefix(self, request: Request, prefix: list[int]) -> bool:
        """Whether other requests compute at least half of the tokens after `prefix` (for example
        the n choices of a prompt). A request that has ended counts until its blocks are freed."""
        num_computing = 0
        for block_hash in request.block_hashes[len(prefix) : self._max_prefix_blocks(request)]:
            if block_hash not in self._computing:
                break
            num_computing += 1
        if not num_computing:
            return False
        num_uncached = request.num_tokens - len(prefix) * self.block_size
        return 2 * num_computing * self.block_size >= num_uncached

    def num_free_blocks_needed(self, request: Request, prefix: list[int]) -> int:
        """Number of free blocks needed to hold all tokens of a request with this cached
        `prefix`."""
        num_free_prefix = sum(1 for block in prefix if block == ON_HOST or self.pool.is_free(block))
        return self.num_blocks_for(request.num_tokens) - len(prefix) + num_free_prefix

    def attach_prefix(self, request: Request, prefix: list[int]) -> None:
        """Start the request's block table with `prefix`, whose tokens count as computed."""
        assert not request.blocks, f"{request.key} starts with {len(request.blocks)} blocks"
        for block in prefix:
            if block != ON_HOST:
                self.pool.touch(block)
        self.offload.started(request.key)
        if ON_HOST in prefix:
            prefix = self._load(request, prefix)
        request.blocks = prefix
        request.num_computed_tokens = request.num_cached_tokens = len(prefix) * self.block_size
        if self.prefix_caching:
            request.next_cache_at = request.num_computed_tokens + self.block_size
            request.pending_hashes = request.block_hashes[len(prefix) :]
            for block_hash in request.pending_hashes:
                self._computing.setdefault(block_hash, request)

    def _load(self, request: Request, prefix: list[int]) -> list[int]:
        """Return `prefix` with newly allocated blocks in place of ON_HOST. The blocks are cached at
        once: the next plan copies their contents before its launches run."""
        hashes = [
            block_hash
            for block, block_hash in zip(prefix, request.block_hashes, strict=False)
            if block == ON_HOST
        ]
        # Pin before allocating: allocation can evict blocks to the host.
        slots = self.offload.pin(hashes)
        loaded = self.pool.allocate(len(hashes))
        self.offload.load(slots, loaded, hashes)
        for block, block_hash in zip(loaded, hashes, strict=True):
            self.pool.cache_block(block, block_hash)
        rest = iter(loaded)
        return [next(rest) if block == ON_HOST else block for block in prefix]

    def allocate(self, request: Request, count: int) -> list[int]:
        """Allocate `count` more blocks, which must be free."""
        allocated = self.pool.allocate(count)
        request.blocks.extend(allocated)
        if self.contiguous and allocated:
            # The pool allocates the lowest blocks first, in ascending order.
            request.max_block_end = max(request.max_block_end, allocated[-1] + 1)
        room = len(request.blocks) * self.block_size - self.num_lookahead_tokens
        request.decode_limit = min(room, request.max_num_tokens - 1)
        return allocated

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks to allocate for the request's next decode."""
        num_tokens = request.num_computed_tokens + 1 + self.num_lookahead_tokens
        needed = self.num_blocks_for(min(num_tokens, request.max_num_tokens))
        return needed - len(request.blocks)

    def num_decode_blocks(self, request: Request) -> int:
        """Number of blocks that a decode batch of only this request reads."""
        return request.max_block_end if self.contiguous else len(request.blocks)

    def defragment(self, requests: Iterable[Request], threshold: int) -> list[tuple[int, int]]:
        """Move the highest used blocks down once more than `threshold` blocks are free below the
        highest used block. Returns (from, to) pairs, usually empty. `requests`: all requests with
        blocks.

        Block tables are updated and the old blocks are freed immediately. The caller must move the
        contents before any of these blocks is read or written.
        """
        requests = list(requests)
        block_end = max((request.max_block_end for request in requests), default=0)
        if block_end - threshold <= self.pool.size - self.pool.num_free:
            return []
        moves = self.pool.compact(MAX_MOVES)
        moved_to = dict(moves)
        for request in requests:
            request.blocks = [moved_to.get(block, block) for block in request.blocks]
            request.max_block_end = max(request.blocks, default=-1) + 1
        return moves

    def cache_blocks(self, request: Request, num_cached_tokens: int) -> None:
        """Cache the blocks of `request` that are full, given that the KV of its first
        `num_cached_tokens` tokens is written."""
        size = self.block_size
        while request.next_cache_at <= num_cached_tokens:
            stop = request.next_cache_at
            index = stop // size - 1
            if index == len(request.block_hashes):
                parent = (
                    request.block_hashes[-1] if request.block_hashes else self._root_hash(request)
                )
                tokens = request.token_bytes(stop - size, stop)
                images = images_in(request.images, stop - size, stop)
                request.block_hashes.append(chain(parent, tokens, images))
            block_hash = request.block_hashes[index]
            self.pool.cache_block(request.blocks[index], block_hash)
            self._computing.pop(block_hash, None)
            request.next_cache_at = stop + size

    def _root_hash(self, request: Request) -> bytes:
        images = request.images if self._all_see_images else ()
        return root_hash(request.cache_salt, request.adapter, images)

    def evict(self, request: Request) -> None:
        """Remove the request's blocks from the prefix cache and stop caching its later blocks."""
        request.next_cache_at = NEVER
        for block in request.blocks:
            self.pool.evict(block)
        for block_hash in request.block_hashes[: len(request.blocks)]:
            self.offload.drop(block_hash)

    def drop(self, block: int, block_hash: bytes) -> None:
        """Remove a corrupt block and its copies from all caches. The block may since have been
        freed or reused."""
        if self.pool.get_cached_block(block_hash) == block:
            self.pool.evict(block)
        self.offload.drop(block_hash)

    def free(self, request: Request) -> None:
        """Free the request's blocks, tail first, so that a prefix is evicted after its
        continuation."""
        for block_hash in request.pending_hashes:
            if self._computing.get(block_hash) is request:
                del self._computing[block_hash]
        request.pending_hashes = []
        if request.state == PREEMPTED:
            self.offload.preempted(request.key, request.block_hashes[: len(request.blocks)])
        self.pool.free(reversed(request.blocks))
        request.blocks = []
        request.num_computed_tokens = request.num_cached_tokens = 0
        request.decode_limit = request.max_block_end = 0
        request.next_cache_at = NEVER

    def forget(self, request: Request) -> None:
        """Drop the offload state of a waiting request that has ended."""
        self.offload.started(request.key)

    def reset_prefix_cache(self, requests: Iterable[Request], *, drops_files: bool = True) -> None:
        """Drop every hash. `drops_files`: also drop blocks in files. `requests`: all requests with
        blocks; they stop caching, since their KV was computed before the reset."""
        self.offload.reset(drops_files=drops_files)
        self.pool.reset_cache()
        self._computing.clear()
        for request in requests:
            request.next_cache_at = NEVER

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless the pool and the block tables of `requests` agree."""
        requests = list(requests)
        self.offload.check()
        self.pool.check(request.blocks for request in requests)
        strays = {request.key for request in self._computing.values() if request not in requests}
        assert not strays, f"{strays} compute blocks and have none"
        for request in requests:
            num_tokens = min(request.num_computed_tokens, request.max_num_tokens)
            min_blocks = self.num_blocks_for(num_tokens)
            max_blocks = self.num_blocks_for(num_tokens + self.num_lookahead_tokens)
            assert min_blocks <= len(request.blocks) <= max_blocks, (
                f"{request.key} has {len(request.blocks)} blocks, its {num_tokens} computed tokens "
                f"need {min_blocks}"
            )
            block_end = max(request.blocks, default=-1) + 1
            assert not self.contiguous or request.max_block_end == block_end, (
                f"{request.key} has block {block_end - 1}, its max_block_end is "
                f"{request.max_block_end}"
            )
