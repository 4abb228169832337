"""Scheduler: selects the requests of a step and their token counts."""

import logging
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from config.engine import SchedulerConfig
from config.log import LimitedWarning
from engine.kv_cache.manager import KVCacheManager
from engine.request import FINISHED, MATCHING, PREEMPTED, RUNNING, WAITING, Request
from engine.scheduling.continuation_turns import ContinuationTurns
from engine.scheduling.grammar_masks import add_masks
from engine.scheduling.known_tokens import known_tokens
from engine.scheduling.launch_packer import Chunk, LaunchPacker
from engine.scheduling.resource import Refusal, RequestResource
from engine.scheduling.shares import Units, over_share
from engine.scheduling.waiting_queue import WaitingQueue
from engine.stats import StepStats
from engine.transport.messages import AddRequest
from hpu.protocol import DECODE, PREFILL, TOKEN_BYTES, Launch, NewRequest, StepPlan

logger = logging.getLogger(__name__)

_priority_key = attrgetter("priority_key")

WATERMARK_SHARE = 100
"""Admission watermark: while requests run, an admission leaves 1/WATERMARK_SHARE of the blocks
free, so that the running requests can grow a little before a preemption."""
YIELD_STEPS = 16
"""Minimum steps between two attempts to preempt requests in favour of a tenant below its share:
each preemption recomputes a request."""
RESERVED_STEPS = 8
"""Steps for which a finished beam's index is reserved for its continuation. Usually longer than a
front end takes to send the continuation."""


@dataclass(slots=True)
class SchedulerOutput:
    """Decisions of `schedule`, kept while the plan is in flight to identify its requests."""

    step: int
    plan: StepPlan | None = None
    """None if there is nothing to launch. A step in which all decodes wait for their input tokens
    has a plan without launches."""
    decodes: list[Request] = field(default_factory=list)
    """Decoding requests, in the order of the plan's decode launches."""
    prefills: list[Chunk] = field(default_factory=list)
    """Prefill chunks, in the order of the launches that follow the decodes."""
    num_tokens: int = 0
    started: list[tuple[Request, int]] = field(default_factory=list)
    """Newly admitted requests with their number of prefix-cache tokens; without requests that start
    again after a preemption or a restart."""
    failed: list[tuple[Request, str]] = field(default_factory=list)
    """Requests that can never run, with the error message."""
    chunks: list[Chunk] = field(default_factory=list)
    """Prefill chunks in scheduling order."""
    num_decode_blocks: int = 0
    decode_counts: list[int] = field(default_factory=list)
    """Number of decodes of each request in `decodes`; empty if each decodes once."""
    new_requests: list[NewRequest] = field(default_factory=list)
    grown_requests: list[int] = field(default_factory=list)
    grown_blocks: list[int] = field(default_factory=list)
    deferred: list[Request] = field(default_factory=list)
    """Requests whose grammar masks are sent after the plan, in the order of
    `plan.deferred_requests`."""


class LaunchFacts(NamedTuple):
    """Properties of the workers' launches that the scheduler uses."""

    prefill_tokens: int = 0
    """Prompt tokens after which a step schedules no further prefill chunk; 0: limited by the budget
    only."""
    num_stages: int = 1
    """Pipeline stages."""
    tokens_per_decode: int = 1
    """Maximum tokens that a decode computes; more than 1 with speculation."""
    decodes_per_step: int = 1
    """Maximum decodes of a request in a step."""
    defrag_threshold: int = 32
    """Tolerated number of free blocks below the highest used block if decodes read a slice of the
    cache."""


ONE_DEVICE = LaunchFacts()


class Scheduler:
    """Schedules the decodes and prefill chunks of running requests, then spends the rest of the
    budget on waiting requests.

    A running request is in prefill until all its tokens are computed, then it decodes. A finished
    or preempted request keeps its blocks and its index until the last plan that contains it is
    collected (`_draining`). Both running lists are sorted by priority key; the last request is
    preempted first.

    If a larger prefill launch takes no less time per token (`LaunchFacts.prefill_tokens`), prompts
    that arrive together are spread over several steps, so that the first prompts need not wait for
    the launch of the last. Only the first of these steps decodes: a decode in each step would delay
    the later prompts. Running requests wait at most as long as for a single step with all these
    prompts.

    A step without prompts decodes each request up to `LaunchFacts.decodes_per_step` times, so that
    the host's overhead is spread over several tokens. A request decodes fewer times if it reaches
    its length limit or gets no block for its later tokens; a request with a grammar limits the step
    to a single decode, because each of its tokens needs a bitmask.

    With pipeline stages, a decode's input token returns to the first stage `num_stages` steps after
    the step that samples it. Each step runs a share of the decodes, so that several shares are in
    the pipeline at once. A step in which all decodes must wait gets a plan without launches.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        kv: KVCacheManager,
        packer: LaunchPacker,
        stats: StepStats,
        resources: Sequence[RequestResource] = (),
        facts: LaunchFacts = ONE_DEVICE,
    ) -> None:
        """`resources`: applied in this order when they limit a chunk."""
        self.waiting = waiting
        self._resources = resources
        self._holds_back_later = any(resource.holds_back_later for resource in resources)
        self._kv = kv
        self._packer = packer
        self._stats = stats
        mode = "SWAP" if kv.offload.is_enabled else "RECOMPUTE"
        # vLLM's line, for scripts that read the log.
        self._preemptions = LimitedWarning(
            logger,
            f"Sequence group %d is preempted by PreemptionMode.{mode} mode because there is not "
            "enough KV cache space. This can affect the end-to-end performance. Increase "
            "gpu_memory_utilization or tensor_parallel_size to provide more KV cache memory (on a "
            "CPU kv_cache_memory_bytes), or lower max_num_seqs. "
            "total_num_cumulative_preemption=%d",
        )
        self._max_tokens = packer.max_tokens
        self._launch_tokens = facts.prefill_tokens or packer.max_tokens
        self._num_since_decodes = 0
        """Prompt tokens scheduled since decodes last ran; reset to 0 by a step that is not full. At
        0, the next step runs decodes."""
        self._num_stages = facts.num_stages
        self._decode_tokens = facts.tokens_per_decode
        self._max_decodes = facts.decodes_per_step
        num_decode_tokens = config.max_num_seqs * facts.tokens_per_decode
        self._divides_prompts = config.enable_chunked_prefill
        drafts_reduce_prompts = facts.tokens_per_decode > 1 and config.enable_chunked_prefill
        if drafts_reduce_prompts and num_decode_tokens > packer.max_tokens:
            logger.warning(
                "%d decodes of %d tokens, with their drafts, need %d tokens in a step, "
                "max_num_batched_tokens is %d: a step with all of them computes at most %d "
                "prompt tokens; set --max-num-batched-tokens above %d",
                config.max_num_seqs,
                facts.tokens_per_decode,
                num_decode_tokens,
                packer.max_tokens,
                kv.block_size,
                num_decode_tokens,
            )
        self._num_last_tokens = facts.tokens_per_decode if facts.num_stages > 1 else 1
        """Number of latest tokens sent with each decode; more than 1 only with both pipeline stages
        and speculation."""
        self._is_waiting_for_tokens = False
        """Whether this step skipped a decode, because its input token has not returned yet or the
        step's share of the decodes is full."""
        self._max_num_seqs = config.max_num_seqs
        self._is_fair = config.fair_share
        self._next_yield_step = 0
        self._watermark = max(kv.pool.size // WATERMARK_SHARE, 1)
        self._decoding: list[Request] = []
        self._prefilling: list[Request] = []
        self._draining: list[Request] = []
        self._suspect: Request | None = None
        """The crash suspect admitted last; see `_held_for_isolation`."""
        self._free_indices = list(range(config.max_num_seqs - 1, -1, -1))
        self._reservations: deque[int] = deque()
        """Steps at which the reservations of indices for continuations expire."""
        self._turns = ContinuationTurns(config.max_num_seqs)
        self._freed_indices: list[int] = []
        """Indices freed since the last plan; sent to the worker with the next plan."""
        self._defrag_threshold = facts.defrag_threshold
        self._moves: list[tuple[int, int]] = []
        """Blocks moved since the last plan, as (from, to); sent with the next plan."""
        self._last_collected_step = -1
        self._files_version = 0
        """Value of `KVOffload.version` when requests that wait for files were last reconsidered."""
        self._has_finished = False
        """Whether the running lists contain finished requests."""

    @property
    def num_running(self) -> int:
        """Requests with an index, excluding draining requests."""
        return self._max_num_seqs - len(self._free_indices) - len(self._draining)

    @property
    def num_prefilling_tokens(self) -> int:
        """Uncomputed prefill tokens of running requests."""
        return sum(
            request.num_prefill_tokens - request.num_computed_tokens
            for request in self._prefilling
            if request.state == RUNNING
        )

    @property
    def requests_with_blocks(self) -> list[Request]:
        running = [r for r in (*self._decoding, *self._prefilling) if r.state == RUNNING]
        return running + self._draining

    @property
    def has_work(self) -> bool:
        return len(self.waiting) > 0 or len(self._free_indices) < self._max_num_seqs

    def refusal(self, message: AddRequest) -> Refusal | None:
        """Why the model or the KV cache cannot serve a request; None if it can."""
        if message.pooling is not None:
            return Refusal("the model generates tokens and returns no vectors", "model")
        num_blocks = self._kv.num_blocks_for(message.prompt.nbytes // TOKEN_BYTES)
        if num_blocks <= self._kv.pool.size:
            return None
        return Refusal(
            f"the prompt needs {num_blocks} KV blocks of {self._kv.block_size} tokens, "
            f"the cache has {self._kv.pool.size}",
            "",
        )

    def add_request(self, request: Request) -> None:
        for resource in self._resources:
            resource.add_request(request)
        if request.state == WAITING:
            self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Add a request to the waiting queue; its state may be MATCHING."""
        request.state = WAITING
        self.waiting.add(request)
        # File reads start while the request waits.
        self._kv.prefetch(request)

    def finish_requests(self, requests: Iterable[Request]) -> None:
        """Remove requests that finished, failed or were aborted, in any state."""
        for request in requests:
            state, request.state = request.state, FINISHED
            if state == WAITING:
                self.waiting.remove(request)
                self._kv.forget(request)
            elif state == RUNNING:
                self._has_finished = True
                self._remove(request)
            if state != FINISHED:
                for resource in self._resources:
                    resource.finish_request(request)
                self.waiting.finish(request)

    def restart_requests(self, blocks: Set[int]) -> list[Request]:
        """Restart the requests whose block tables contain any of the corrupt `blocks`. Their
        computed KV is dropped. Returns the waiting copies that replace the requests."""
        restarted = [
            self._restart(request)
            for request in self.requests_with_blocks
            if request.state != FINISHED and not blocks.isdisjoint(request.blocks)
        ]
        for request in restarted:
            self.waiting.add(request)
        return restarted

    def hold_back(self, requests: Iterable[Request]) -> list[Request]:
        """Stop requests with output that their grammar has not matched yet. Tokens that plans in
        flight sample for them are dropped. Returns the copies that replace the requests, in the
        state MATCHING; `enqueue` makes them wait."""
        held_back = [self._restart(request) for request in requests]
        for request in held_back:
            request.state = MATCHING
        return held_back

    def _restart(self, request: Request) -> Request:
        is_running, request.state = request.state == RUNNING, FINISHED
        if is_running:
            self._has_finished = True
            self._remove(request)
        return request.restarted()

    def update_from_output(self, step: int) -> None:
        """Free the draining requests whose last plan is at most `step`, since that plan has been
        collected."""
        self._last_collected_step = step
        if self._draining:
            drained = [r for r in self._draining if r.last_step <= step]
            if drained:
                self._draining = [r for r in self._draining if r.last_step > step]
                for request in drained:
                    self._free(request)

    def reset(self) -> None:
        """Reset after the worker lost its batch state and KV cache. No request may have blocks or
        an index."""
        assert not self._draining, f"{len(self._draining)} requests are draining"
        for resource in self._resources:
            resource.reset()
        self._freed_indices.clear()
        self._moves.clear()

    def schedule(self, step: int) -> SchedulerOutput:
        """Schedule a step. The caller must submit the output's plan unless it is None."""
        output = SchedulerOutput(step)
        while self._reservations and self._reservations[0] <= step:
            self._reservations.popleft()
        self._update_running()
        self._turns.begin_step(step, self.waiting)
        for resource in self._resources:
            resource.begin_step()
        if self._kv.contiguous and not self._moves:
            self._moves = self._kv.defragment(self.requests_with_blocks, self._defrag_threshold)
        num_since_decodes = self._num_since_decodes
        if 0 < num_since_decodes <= self._max_tokens - self._launch_tokens:
            self._schedule_prompts(output, self._max_tokens - num_since_decodes)
        if not output.chunks:
            num_since_decodes = 0
            self._schedule_decodes(output)
            self._schedule_prompts(output, self._prompt_budget(len(output.decodes)))
        is_full = output.num_tokens >= self._launch_tokens
        self._num_since_decodes = num_since_decodes + output.num_tokens if is_full else 0
        if self._max_decodes > 1 and output.decodes and not output.chunks:
            self._schedule_further_decodes(output)
        self._build_plan(output)
        return output

    def _prompt_budget(self, num_decodes: int) -> int:
        """Token budget of prompts after `num_decodes` decodes. Decodes reserve all their draft
        tokens, but leave prompts a block of tokens, if the budget has room, to avoid starvation.
        Without chunked prefill, prompts get the full budget: the longest prompt could otherwise not
        start until all decodes end."""
        if not self._divides_prompts:
            return self._max_tokens
        num_left = self._max_tokens - num_decodes
        return max(
            self._max_tokens - num_decodes * self._decode_tokens,
            min(self._kv.block_size, num_left),
        )

    def _schedule_prompts(self, output: SchedulerOutput, budget: int) -> None:
        budget = self._schedule_prefills(output, budget)
        self._admit(output, budget)

    def _update_running(self) -> None:
        """Remove finished requests, and move requests whose prefill is complete to decoding."""
        if self._has_finished:
            self._has_finished = False
            self._decoding = [r for r in self._decoding if r.state == RUNNING]
            self._prefilling = [r for r in self._prefilling if r.state == RUNNING]
        if self._prefilling:
            still_prefilling = []
            for request in self._prefilling:
                if request.num_computed_tokens < request.num_prefill_tokens:
                    still_prefilling.append(request)
                else:
                    insort(self._decoding, request, key=_priority_key)
            self._prefilling = still_prefilling

    def _schedule_decodes(self, output: SchedulerOutput) -> None:
        step = output.step
        scheduled = output.decodes
        num_blocks = 0
        last_returned = step - self._num_stages
        most = -(-len(self._decoding) // self._num_stages)
        self._is_waiting_for_tokens = False
        # Preemption removes requests after the current request from the end of the list, so the
        # loop skips no entry.
        for request in self._decoding:
            if request.last_step > last_returned or len(scheduled) == most:
                if not _is_last_token_scheduled(request):
                    self._is_waiting_for_tokens = True
                continue
            num_computed = request.num_computed_tokens
            if num_computed >= request.decode_limit and not self._can_decode(request, output):
                continue
            request.num_computed_tokens = num_computed + 1
            request.last_step = step
            num_blocks += len(request.blocks)
            scheduled.append(request)
        if self._kv.contiguous:
            num_blocks = max((request.max_block_end for request in scheduled), default=0)
        output.num_decode_blocks = num_blocks

    def _can_decode(self, request: Request, output: SchedulerOutput) -> bool:
        """Whether a request at its `decode_limit` can decode in this step; if so, allocates its
        blocks."""
        if _is_last_token_scheduled(request):
            return False
        count = self._kv.num_missing_blocks(request)
        error = self._packer.refusal(DECODE, 1, len(request.blocks) + count)
        if error is not None:
            self._reject(request, error, output)
            return False
        if not self._ensure_free_blocks(request, count, output):
            return False
        self._allocate(request, count, output)
        return True

    def _schedule_further_decodes(self, output: SchedulerOutput) -> None:
        """Decode each request of the step again, up to `_max_decodes` times in total, unless one of
        them has a grammar. Uses free blocks only, without preemption."""
        if any(request.sampling.masked for request in output.decodes):
            return
        counts = [1 + self._decode_ahead(request, output) for request in output.decodes]
        if max(counts) > 1:
            output.decode_counts = counts
            output.num_decode_blocks = self._num_decode_blocks(output.decodes)

    def _decode_ahead(self, request: Request, output: SchedulerOutput) -> int:
        """Number of further decodes of a request that decodes in this step. Allocates their
        blocks."""
        num_computed = request.num_computed_tokens
        count = self._max_decodes - 1
        if num_computed + count > request.decode_limit:
            if request.state != RUNNING:  # preempted in favour of a waiting request
                return 0
            count = min(count, request.max_num_tokens - 1 - num_computed)
            num_missing = self._kv.num_blocks_for(num_computed + count) - len(request.blocks)
            num_missing = min(num_missing, self._kv.pool.num_free)
            if num_missing > 0 and self._packer.holds(DECODE, 1, len(request.blocks) + num_missing):
                self._allocate(request, num_missing, output)
            count = min(count, request.decode_limit - num_computed)
        request.num_computed_tokens = num_computed + count
        return count

    def _num_decode_blocks(self, requests: list[Request]) -> int:
        """Number of blocks that a decode of `requests` reads."""
        blocks = map(self._kv.num_decode_blocks, requests)
        return max(blocks) if self._kv.contiguous else sum(blocks)

    def _schedule_prefills(self, output: SchedulerOutput, budget: int) -> int:
        for request in self._prefilling:
            if budget == 0 or output.num_tokens >= self._launch_tokens:
                break
            num_computed = request.num_computed_tokens
            num_left = min(request.num_prefill_tokens - num_computed, budget)
            count = self._fit(request, num_computed, num_left)
            if not count:
                if self._holds_back_later:
                    # Later requests must not overtake it: start no further prefill.
                    return 0
                continue
            error = self._packer.refusal(PREFILL, count, self._kv.num_blocks_for(num_computed))
            if error is not None:
                self._reject(request, error, output)
                continue
            num_missing = self._kv.num_blocks_for(num_computed + count) - len(request.blocks)
            if num_missing > 0:
                if not self._ensure_free_blocks(request, 1, output):
                    continue
                num_blocks = len(request.blocks) + min(num_missing, self._kv.pool.num_free)
                room = num_blocks * self._kv.block_size - num_computed
                if room < count and not self._fit(request, num_computed, room):
                    # The next tokens must not be split: an image, or a whole prompt.
                    if not self._ensure_free_blocks(request, num_missing, output):
                        continue
                elif room < count:
                    count = self._fit(request, num_computed, room)
                num_missing = self._kv.num_blocks_for(num_computed + count) - len(request.blocks)
                self._allocate(request, max(num_missing, 0), output)
            self._add_chunk(request, count, output)
            budget -= count
        return budget

    def _admit(self, output: SchedulerOutput, budget: int) -> None:
        """Admit waiting requests in the order of `_turns` while the free blocks hold all their
        tokens. Requests whose blocks are being read from files are skipped.

        Allocates only the blocks of the first chunk: `_schedule_prefills` allocates the blocks of
        each later chunk, and preempts later requests if needed.
        """
        kv = self._kv
        if kv.offload.version != self._files_version:
            self._files_version = kv.offload.version
            self.waiting.unskip()
        if self._is_fair and budget > 0 and not self._free_indices:
            self._yield_index(output.step)
        while budget > 0 and self._free_indices and (request := self._turns.next(self.waiting)):
            if output.num_tokens >= self._launch_tokens or not self._has_free_index(request):
                break
            if self._held_for_isolation(request):
                break
            prefix = kv.find_prefix(request)
            if kv.should_wait_for_prefix(request, prefix):
                break
            if kv.should_wait_for_files(request, prefix):
                # File reads take far longer than a step: do not block later requests.
                self.waiting.skip(request)
                continue
            num_needed = kv.num_free_blocks_needed(request, prefix)
            if self._decoding or self._prefilling or self._draining:
                num_missing = num_needed - (kv.pool.num_free - self._watermark)
                if num_missing > 0:
                    if self._is_fair:
                        units = Units(kv.pool.size, num_missing, num_needed)
                        self._yield_blocks(request, units, output.step)
                    break
            elif num_needed > kv.pool.num_free:
                self._fail(request, kv.num_blocks_for(request.num_tokens), output)
                continue
            num_cached = len(prefix) * kv.block_size
            count = self._fit(request, num_cached, min(request.num_tokens - num_cached, budget))
            if not count:
                break
            error = self._admission_refusal(request, count, num_cached)
            if error is not None:
                self._reject(request, error, output)
                continue
            self.waiting.remove(request)
            kv.attach_prefix(request, prefix)
            kv.allocate(request, kv.num_blocks_for(num_cached + count) - len(request.blocks))
            self._start(request, num_cached, output)
            self._add_chunk(request, count, output)
            budget -= count

    def _yield_index(self, step: int) -> None:
        """Preempt a request of a tenant that has more than its share of a full batch, if a tenant
        below its share waits."""
        if self._may_yield(step):
            newcomer = self.waiting.peek(is_new=True)
            if newcomer and not self._held_for_isolation(newcomer):
                self._yield(newcomer, lambda request: 1, Units(self._max_num_seqs, 1, 1))

    def _yield_blocks(self, newcomer: Request, units: Units, step: int) -> None:
        """Like `_yield_index`, for KV blocks."""
        if self._may_yield(step):
            self._yield(newcomer, lambda request: len(request.blocks), units)

    def _may_yield(self, step: int) -> bool:
        # Draining requests free their indices and blocks within a few steps.
        if self._draining or step < self._next_yield_step:
            return False
        self._next_yield_step = step + YIELD_STEPS
        for request in (*self._decoding, *self._prefilling):
            self.waiting.progress(request)
        return True

    def _yield(self, newcomer: Request, cost: Callable[[Request], int], units: Units) -> None:
        decoding = set(self._decoding)

        def can_yield(request: Request) -> bool:
            # Preempting requests in prefill could waste their computation again and again.
            return request in decoding and not _is_last_token_scheduled(request)

        running = [*self._decoding, *self._prefilling]
        for request in over_share(newcomer, running, cost, units, can_yield):
            self._preempt(request)

    def _held_for_isolation(self, request: Request) -> bool:
        """Whether crash isolation holds this request back. A suspect is admitted only once every
        running request has produced a token since its admission; after that, no request is admitted
        until the suspect has produced a token."""
        suspect = self._suspect
        if suspect is not None and suspect.state == RUNNING and suspect.has_no_output:
            return True
        self._suspect = None
        running = (*self._decoding, *self._prefilling) if request.is_suspect else ()
        return any(request.has_no_output for request in running)

    def _fit(self, request: Request, start: int, count: int) -> int:
        """Largest number of tokens from `start`, at most `count`, that every resource allows."""
        for resource in self._resources:
            count = resource.fit(request, start, count)
        return count

    def _has_free_index(self, request: Request) -> bool:
        """Whether a free index is available to the request. While other requests run, the indices
        of finished beams are reserved for their continuations. Otherwise a beam search in a full
        batch would lose its indices at every token and wait for all requests that have arrived
        since."""
        is_busy = self._decoding or self._prefilling or self._draining
        is_held = is_busy and not (request.is_continuation or self._turns.has_turn(request))
        num_reserved = len(self._reservations) if is_held else 0
        return len(self._free_indices) > num_reserved

    def _start(self, request: Request, num_cached: int, output: SchedulerOutput) -> None:
        self._turns.start(request)
        if request.is_continuation and self._reservations:
            self._reservations.popleft()
        for resource in self._resources:
            resource.start(request)
        self.waiting.start(request, num_cached)
        request.req_index = self._free_indices.pop()
        request.state = RUNNING
        request.num_prefill_tokens = request.num_tokens
        request.num_prefix_tokens = num_cached
        request.drafts = []
        if request.is_suspect:
            self._suspect = request
        insort(self._prefilling, request, key=_priority_key)
        output.new_requests.append(
            NewRequest(
                request.req_index,
                request.token_ids(),
                request.num_prompt_tokens,
                num_cached,
                request.blocks.copy(),
                request.request_sampling(),
                request.lora_slot,
                request.images,
                is_private=bool(request.cache_salt),
            )
        )
        if request.num_preemptions == 0:
            output.started.append((request, num_cached))

    def _add_chunk(self, request: Request, count: int, output: SchedulerOutput) -> None:
        for resource in self._resources:
            resource.add_chunk(request, request.num_computed_tokens, count)
        context = self._kv.num_blocks_for(request.num_computed_tokens)
        request.num_computed_tokens += count
        request.last_step = output.step
        samples = request.num_computed_tokens == request.num_prefill_tokens
        output.chunks.append(Chunk(request, count, context, samples))
        output.num_tokens += count

    def _allocate(self, request: Request, count: int, output: SchedulerOutput) -> None:
        output.grown_blocks.extend(self._kv.allocate(request, count))
        output.grown_requests.extend([request.req_index] * count)

    def _ensure_free_blocks(self, request: Request, count: int, output: SchedulerOutput) -> bool:
        """Whether `count` blocks are free for the request now. If needed, preempts later requests,
        last first. Blocks used by a plan in flight are freed a step later: the request waits for
        them, and no further request is preempted. Fails the request if it alone exceeds the
        cache."""
        while self._kv.pool.num_free < count:
            if self._draining:
                return False
            for running in (self._decoding, self._prefilling):
                # A request rejected in this step stays in its list until the next step. It precedes
                # `request` in that list, or is in the other list.
                while running and running[-1].state == FINISHED:
                    running.pop()
            last = max(self._decoding[-1:] + self._prefilling[-1:], key=_priority_key)
            if _is_last_token_scheduled(last):
                return False
            if last is request:
                is_alone = len(self._decoding) + len(self._prefilling) == 1
                if is_alone and request.last_step <= self._last_collected_step:
                    self._fail(request, len(request.blocks) + count, output)
                return False
            self._preempt(last)
            self._preemptions.add(last.key)
        return True

    def _preempt(self, request: Request) -> None:
        """Preempt a running request; it keeps its tokens."""
        assert request.state == RUNNING, f"request {request.key} is preempted in {request.state}"
        (self._decoding if request in self._decoding else self._prefilling).remove(request)
        request.state = PREEMPTED
        request.num_preemptions += 1
        self._stats.counts.preemptions += 1
        self._remove(request)

    def _remove(self, request: Request) -> None:
        self._turns.remove(request)
        for resource in self._resources:
            resource.release(request)
        if request.last_step > self._last_collected_step:
            self._draining.append(request)
        else:
            self._free(request)

    def _free(self, request: Request) -> None:
        self._kv.free(request)
        if request.is_continuation and request.state == FINISHED:
            self._reservations.append(self._last_collected_step + RESERVED_STEPS)
        self._free_indices.append(request.req_index)
        self._freed_indices.append(request.req_index)
        request.req_index = -1
        request.drafts = []
        if request.state == PREEMPTED:
            request.state = WAITING
            self.waiting.add(request)

    def _fail(self, request: Request, num_blocks: int, output: SchedulerOutput) -> None:
        error = (
            f"the request needs {num_blocks} KV blocks of {self._kv.block_size} tokens, "
            f"the cache has {self._kv.pool.size}"
        )
        self._reject(request, error, output)

    def _reject(self, request: Request, error: str, output: SchedulerOutput) -> None:
        """Fail a request that can never run."""
        output.failed.append((request, error))
        self.finish_requests([request])

    def _admission_refusal(self, request: Request, count: int, num_cached: int) -> str | None:
        """Why a request cannot start with a chunk of `count` tokens after `num_cached`; None if it
        can."""
        error = self._packer.refusal(PREFILL, count, self._kv.num_blocks_for(num_cached))
        if error is None and request.max_num_tokens > request.num_tokens + 1:
            num_blocks = self._kv.num_blocks_for(request.num_tokens + 1)
            error = self._packer.refusal(DECODE, 1, num_blocks)
        return error

    def _build_plan(self, output: SchedulerOutput) -> None:
        launches: list[Launch] = []
        if output.decodes:
            self._add_decodes(output.decodes, output.num_decode_blocks, launches, output)
            if output.decode_counts:
                for number in range(1, max(output.decode_counts)):
                    self._add_round(number, launches, output)
        if output.chunks:
            for launch, chunks in self._packer.prefill(output.chunks):
                launches.append(launch)
                output.prefills.extend(chunks)
        if not launches and not self._is_waiting_for_tokens:
            return
        freed, self._freed_indices = self._freed_indices, []
        moves, self._moves = self._moves, []
        output.plan = StepPlan(
            output.step,
            launches,
            output.new_requests,
            output.grown_requests,
            output.grown_blocks,
            freed,
            [source for source, _ in moves],
            [target for _, target in moves],
        )
        if output.decode_counts:
            output.plan.decode_steps = max(output.decode_counts)
        self._kv.offload.fill_plan(output.plan)
        for resource in self._resources:
            resource.fill_plan(output.plan)
        masked = [r for r in output.decodes if r.guide is not None]
        chunks = [c for c in output.prefills if c.samples]
        masked += [c.request for c in chunks if c.request.guide is not None]
        if masked:
            output.deferred = add_masks(output.plan, masked)
        if self._num_last_tokens > 1 and output.decodes:
            output.plan.known = known_tokens(output.decodes, self._num_last_tokens)

    def _add_round(self, number: int, launches: list[Launch], output: SchedulerOutput) -> None:
        """Add the launches of the requests that decode more than `number` times in this step."""
        requests, num_blocks = output.decodes, output.num_decode_blocks
        if min(output.decode_counts) <= number:
            counted = zip(requests, output.decode_counts, strict=True)
            requests = [request for request, count in counted if count > number]
            num_blocks = self._num_decode_blocks(requests)
        self._add_decodes(requests, num_blocks, launches, output)

    def _add_decodes(
        self,
        requests: list[Request],
        num_blocks: int,
        launches: list[Launch],
        output: SchedulerOutput,
    ) -> None:
        req_indices = [request.req_index for request in requests]
        if self._packer.must_split(len(req_indices), num_blocks):
            blocks = [self._kv.num_decode_blocks(request) for request in requests]
            launches += self._packer.decode_split(req_indices, blocks)
        else:
            launches.append(self._packer.decode(req_indices, num_blocks))
        output.num_tokens += len(req_indices)

    def check(self) -> None:
        """Raise AssertionError unless indices, blocks and states agree."""
        requests = self.requests_with_blocks
        self._kv.check(requests)
        both = (*self._decoding, *self._prefilling)
        running = {request.key for request in both if request.state == RUNNING}
        for resource in self._resources:
            resource.check(running)
        used = [request.req_index for request in requests]
        assert sorted(used + self._free_indices) == list(range(self._max_num_seqs)), (
            f"indices {sorted(used)} are used and {sorted(self._free_indices)} free, "
            f"of {self._max_num_seqs} in all"
        )
        for requests in (self._decoding, self._prefilling):
            keys = [request.priority_key for request in requests]
            assert keys == sorted(keys), f"running requests are not sorted: {keys}"


def _is_last_token_scheduled(request: Request) -> bool:
    """Whether submitted plans already compute the request's last token."""
    last_computed = max(request.max_num_tokens - 1, request.num_prefill_tokens)
    return request.num_computed_tokens >= last_computed
