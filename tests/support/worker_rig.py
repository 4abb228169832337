"""WorkerRig: a worker with hand-made plans. Keeps the engine's state in the simplest form: owners
of blocks, numbers of computed tokens, and samples."""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from config.buckets import BucketConfig
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from hpu.protocol import (
    DECODE,
    PREFILL,
    SINGLE_RANK,
    EncoderInput,
    GrammarMasks,
    ImagePlacement,
    Launch,
    NewRequest,
    Ranks,
    RequestSampling,
    StepPlan,
    StepResult,
    WarmupProgress,
)
from hpu.worker.worker import Worker

GREEDY = RequestSampling(temperature=0.0)
BLOCK_SIZE = 8


@dataclass
class _LiveRequest:
    blocks: list[int]
    known: int
    """Number of tokens, including tokens sampled by plans in flight."""
    computed: int
    sampled: list[int] = field(default_factory=list)


@dataclass
class _Next:
    """Contents of the next plan."""

    new_requests: list[NewRequest] = field(default_factory=list)
    freed_requests: list[int] = field(default_factory=list)
    grown_requests: list[int] = field(default_factory=list)
    grown_blocks: list[int] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    moves: dict[int, int] = field(default_factory=dict)
    freed_images: list[bytes] = field(default_factory=list)
    encoded_images: list[EncoderInput] = field(default_factory=list)


class WorkerRig:
    """`steps` rounds shapes up: (batch, query, blocks) multiples; (1, 1, 1) pads nothing."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: tuple[int, int, int] = (1, 1, 1),
        buckets: BucketConfig | None = None,
        num_blocks: int = 96,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        device: str = "cpu",
        dtype: str = "float32",
        prefix_caching: bool = True,
        merged_prefill: bool = False,
        kv_cache_dtype: str = "auto",
        calculate_kv_scales: bool = False,
        images_per_request: int = 1,
        num_scheduler_steps: int = 1,
        ranks: Ranks = SINGLE_RANK,
        **settings: Any,
    ) -> None:
        config = EngineConfig(
            str(folder),
            dtype=dtype,
            device=device,
            num_threads=1,
            cache=CacheConfig(
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                enable_prefix_caching=prefix_caching,
                kv_cache_dtype=kv_cache_dtype,
                calculate_kv_scales=calculate_kv_scales,
                cross_attention_images=images_per_request,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                merged_prefill=merged_prefill,
                num_scheduler_steps=num_scheduler_steps,
            ),
            buckets=buckets or BucketConfig(),
            **settings,
        )
        self.progress: list[WarmupProgress] = []
        self.worker = Worker(config, ranks)
        try:
            self.ready = self.worker.start(self.progress.append)
        except BaseException:
            # An emulated card that stays installed would break all later tests.
            self.worker.close()
            raise
        self.requests: dict[int, _LiveRequest] = {}
        # Not in memory order; the block released last is allocated first.
        self._free = [(block * 37) % num_blocks for block in range(num_blocks)]
        self._held: dict[int, int] = dict.fromkeys(range(num_blocks), 0)
        self._steps = steps
        self._next = _Next()
        self._step = 0
        self._waiting: deque[list[int]] = deque()

    def admit(
        self,
        req_index: int,
        tokens: list[int],
        *,
        num_prompt: int | None = None,
        shared_with: int | None = None,
        sampling: RequestSampling = GREEDY,
        images: tuple[ImagePlacement, ...] = (),
    ) -> None:
        """`shared_with`: the new request shares the full blocks of that request's computed tokens,
        except the block of the last token."""
        blocks: list[int] = []
        if shared_with is not None:
            donor = self.requests[shared_with]
            full = min(donor.computed, len(tokens) - 1) // BLOCK_SIZE
            blocks = donor.blocks[:full]
        for block in blocks:
            self._held[block] += 1
        computed = len(blocks) * BLOCK_SIZE
        self.requests[req_index] = _LiveRequest(list(blocks), len(tokens), computed)
        raw = memoryview(np.array(tokens, "<u4").tobytes())
        prompt = len(tokens) if num_prompt is None else num_prompt
        self._next.new_requests.append(
            NewRequest(
                *(req_index, raw, prompt, computed, list(blocks), sampling), images=list(images)
            )
        )

    def encode(self, *images: EncoderInput) -> None:
        """Make the next plan encode these images."""
        self._next.encoded_images += images

    def free_images(self, *contents: bytes) -> None:
        """Make the next plan drop the embeddings of these images."""
        self._next.freed_images += contents

    def free(self, req_index: int) -> list[int]:
        """Free the request's blocks; returns its sampled tokens."""
        gone = self.requests.pop(req_index)
        for block in gone.blocks:
            self._held[block] -= 1
            if self._held[block] == 0:
                self._free.append(block)
        self._next.freed_requests.append(req_index)
        return gone.sampled

    def prefill(self, counts: dict[int, int | None]) -> None:
        """Prefill these requests in one launch; None takes all known tokens."""
        takes, samples, contexts = [], [], []
        for req_index, asked in counts.items():
            state = self.requests[req_index]
            count = state.known - state.computed if asked is None else asked
            contexts.append(-(-state.computed // BLOCK_SIZE))
            state.computed += count
            self._grow(req_index, state.computed)
            takes.append(count)
            samples.append(state.computed == state.known)
            state.known += samples[-1]
        is_merged = self.ready.bucket_limits.merged_prefill
        join = sum if is_merged else max
        bucket = self._bucket(1 if is_merged else len(counts), join(takes), join(contexts))
        self._next.launches.append(Launch(PREFILL, bucket, list(counts), takes, samples))

    def decode(self, req_indices: list[int]) -> None:
        """One launch that decodes these requests."""
        total = 0
        for req_index in req_indices:
            state = self.requests[req_index]
            assert state.computed == state.known - 1
            state.computed += 1
            state.known += 1
            self._grow(req_index, state.computed)
            total += len(state.blocks)
        if self.ready.contiguous:
            total = 1 + max(max(self.requests[index].blocks) for index in req_indices)
        batch, _, blocks = self._bucket(len(req_indices), 1, total)
        self._next.launches.append(Launch(DECODE, (batch, 1, blocks), list(req_indices)))

    def sleep(self, level: int) -> None:
        """Sleep with all requests freed: a sleeping worker forgets requests that it was not told to
        free."""
        assert not self.requests, f"requests {list(self.requests)} are live"
        self.worker.sleep(level)
        self._next.freed_requests.clear()

    def pack(self) -> None:
        """Move the blocks in use down as far as possible, at the beginning of the next plan."""
        held = sorted((block for block, count in self._held.items() if count), reverse=True)
        free = sorted(self._free)
        moves = {high: low for high, low in zip(held, free, strict=False) if low < high}
        for request in self.requests.values():
            request.blocks = [moves.get(block, block) for block in request.blocks]
        for high, low in moves.items():
            self._held[low], self._held[high] = self._held[high], 0
        self._free = [block for block, count in self._held.items() if not count]
        self._next.moves = moves

    def submit(
        self, allowed: dict[int, list[int]] | None = None, late: tuple[int, ...] = ()
    ) -> None:
        """Send the plan prepared since the last submission. `allowed`: tokens that masked requests
        may sample. `late`: masked requests whose masks are sent later."""
        plan = self._next
        self._next = _Next()
        req_indices = []
        for launch in plan.launches:
            samples = launch.samples or [True] * len(launch.req_indices)
            req_indices += [
                req_index
                for req_index, does in zip(launch.req_indices, samples, strict=True)
                if does
            ]
        self._waiting.append(req_indices)
        allowed = allowed or {}
        self.worker.submit(
            StepPlan(
                self._step,
                plan.launches,
                plan.new_requests,
                plan.grown_requests,
                plan.grown_blocks,
                plan.freed_requests,
                list(plan.moves),
                list(plan.moves.values()),
                list(allowed),
                self._bits(allowed),
                list(late),
                freed_images=plan.freed_images,
                encoded_images=plan.encoded_images,
            )
        )
        self._step += 1

    def mask(self, allowed: dict[int, list[int]]) -> None:
        """Send the allowed next tokens of the late requests of the last plan."""
        self.worker.mask(GrammarMasks(self._step - 1, list(allowed), self._bits(allowed)))

    def collect(self) -> StepResult:
        """Collect the oldest plan's result; its tokens are appended to their requests."""
        result = self.worker.collect()
        for req_index, token in zip(self._waiting.popleft(), result.tokens, strict=True):
            if req_index in self.requests:
                self.requests[req_index].sampled.append(token)
        return result

    def step(self) -> StepResult:
        """Submit the plan and collect its result."""
        self.submit()
        return self.collect()

    def run(self, req_indices: list[int], count: int) -> None:
        """Decode these requests together, `count` times."""
        for _ in range(count):
            self.decode(req_indices)
            self.step()

    def _bits(self, allowed: dict[int, list[int]]) -> memoryview:
        bits = np.zeros((len(allowed), -(-self.ready.vocab_size // 32) * 32), np.uint8)
        for place, tokens in enumerate(allowed.values()):
            bits[place, tokens] = 1
        return memoryview(np.packbits(bits, axis=1, bitorder="little").tobytes())

    def _grow(self, req_index: int, length: int) -> None:
        state = self.requests[req_index]
        while len(state.blocks) * BLOCK_SIZE < length:
            block = self._free.pop()
            self._held[block] = 1
            state.blocks.append(block)
            self._next.grown_requests.append(req_index)
            self._next.grown_blocks.append(block)

    def _bucket(self, batch: int, query: int, blocks: int) -> tuple[int, int, int]:
        wanted = (batch, query, blocks)
        rounded = [-(-size // step) * step for size, step in zip(wanted, self._steps, strict=True)]
        return (rounded[0], rounded[1], rounded[2])
