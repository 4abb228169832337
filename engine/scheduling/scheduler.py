"""Scheduler: who runs this step, with how many tokens. Knows no executor, no messages, no clock."""

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from config.engine import SchedulerConfig
from engine.core.request import ENDED, LEAVING, RUNNING, WAITING, Request
from engine.core.stats import StepStats
from engine.kv_cache.manager import KVCacheManager
from engine.scheduling.grammar_masks import add_masks
from engine.scheduling.launch_packer import Chunk, Packer
from engine.scheduling.waiting_queue import WaitingQueue
from hpu.protocol import DECODE, PREFILL, NewRequest, StepPlan

_rank = attrgetter("rank")

WATERMARK_SHARE = 100
"""One block in so many stays free when a request is admitted beside others, so that those who run
can grow a little before anyone has to give way."""
KEPT_STEPS = 8
"""How long a beam's row is kept for its next token: more than a front-end takes to ask for it."""


@dataclass(slots=True)
class SchedulerOutput:
    """What one turn decided; while its plan runs, who is in it."""

    step: int
    plan: StepPlan | None = None
    """None: nothing to launch, nothing to submit."""
    decodes: list[Request] = field(default_factory=list)
    """In the order of the plan's first launches, the decodes."""
    prefills: list[Chunk] = field(default_factory=list)
    """In the order of the launches behind it."""
    num_tokens: int = 0
    started: list[tuple[Request, int]] = field(default_factory=list)
    """Who left the waiting line for the first time, and tokens found in the prefix cache."""
    failed: list[tuple[Request, str, str | None]] = field(default_factory=list)
    """With the words, and the setting at fault (see Finish.param)."""
    """Who can never fit, and why."""
    chunks: list[Chunk] = field(default_factory=list)
    num_decode_blocks: int = 0
    new_requests: list[NewRequest] = field(default_factory=list)
    grown_requests: list[int] = field(default_factory=list)
    grown_blocks: list[int] = field(default_factory=list)
    late: list[Request] = field(default_factory=list)
    """Those of the plan's late rows, in their order."""


class Scheduler:
    """Gives every running row its tokens, and the rest of the budget to prompts, by rank.

    A request stands in line, runs (in prefill until its known tokens are computed, then decoding),
    or leaves: what left keeps blocks and row until the last plan that names it was collected.
    Both running lists are kept in order of rank, so the last one is the first to give way.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        packer: Packer,
        stats: StepStats,
        *,
        defrag_threshold: int = 32,
    ) -> None:
        """`defrag_threshold`: where decodes read a slice of the cache, blocks that may lie unused
        below the highest one in use."""
        self.line = WaitingQueue()
        self._kv = kv
        self._packer = packer
        self._stats = stats
        self._max_tokens = config.max_num_batched_tokens
        self._num_rows = config.max_num_seqs
        self._watermark = max(kv.pool.size // WATERMARK_SHARE, 1)
        self._decoding: list[Request] = []
        self._prefilling: list[Request] = []
        self._leaving: list[Request] = []
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._kept: deque[int] = deque()
        """A step for each free row that is kept for what goes on: it is anybody's from then on."""
        self._freed_rows: list[int] = []
        """Given back since the last plan, which has yet to say so."""
        self._defrag_threshold = defrag_threshold
        self._moves: list[tuple[int, int]] = []
        """Blocks moved since the last plan, in the same way."""
        self._collected = -1
        self._has_dropped = False

    @property
    def num_running(self) -> int:
        """Rows that are not on their way out."""
        return self._num_rows - len(self._free_rows) - len(self._leaving)

    @property
    def holders(self) -> list[Request]:
        """Everyone with a row."""
        running = [r for r in (*self._decoding, *self._prefilling) if r.state == RUNNING]
        return running + self._leaving

    @property
    def has_work(self) -> bool:
        return len(self.line) > 0 or len(self._free_rows) < self._num_rows

    def add(self, request: Request) -> None:
        self.line.push(request)

    def drop(self, request: Request) -> None:
        """It is over, wherever it is: finished, failed or aborted."""
        state, request.state = request.state, ENDED
        if state == WAITING:
            self.line.remove(request)
        elif state == RUNNING:
            self._has_dropped = True
            self._let_go(request)

    def collected(self, step: int) -> None:
        """All plans up to `step` have run: what left by then gives back its blocks and its row."""
        self._collected = step
        if self._leaving:
            gone = [r for r in self._leaving if r.last_step <= step]
            if gone:
                self._leaving = [r for r in self._leaving if r.last_step > step]
                for request in gone:
                    self._release(request)

    def start_afresh(self) -> None:
        """The worker has forgotten every row and block; nobody is left who had any."""
        assert not self._leaving, f"{len(self._leaving)} are on their way out"
        self._freed_rows.clear()
        self._moves.clear()

    def plan(self, step: int) -> SchedulerOutput:
        """Decide this step. Counts on the decision's plan, if it has one, being submitted."""
        decision = SchedulerOutput(step)
        while self._kept and self._kept[0] <= step:
            self._kept.popleft()
        self._sort_out()
        if self._kv.contiguous and not self._moves:
            self._moves = self._kv.pack(self.holders, self._defrag_threshold)
        self._plan_decodes(decision)
        budget = self._max_tokens - len(decision.decodes)
        budget = self._plan_prefills(decision, budget)
        self._admit(decision, budget)
        self._build(decision)
        return decision

    def _sort_out(self) -> None:
        """Take out who was dropped, and move whoever has all known tokens planned to decoding."""
        if self._has_dropped:
            self._has_dropped = False
            self._decoding = [r for r in self._decoding if r.state == RUNNING]
            self._prefilling = [r for r in self._prefilling if r.state == RUNNING]
        if self._prefilling:
            for request in self._prefilling:
                if request.computed == request.decode_from:
                    insort(self._decoding, request, key=_rank)
            self._prefilling = [r for r in self._prefilling if r.computed < r.decode_from]

    def _plan_decodes(self, decision: SchedulerOutput) -> None:
        step = decision.step
        planned = decision.decodes
        num_blocks = 0
        # Who gives way stands behind who needs the blocks, so the list only loses what the loop
        # has not reached.
        for request in self._decoding:
            computed = request.computed
            if computed >= request.pause_at and not self._may_go_on(request, decision):
                continue
            request.computed = computed + 1
            request.last_step = step
            num_blocks += len(request.blocks)
            planned.append(request)
        if self._kv.contiguous:
            num_blocks = max((request.reach for request in planned), default=0)
        decision.num_decode_blocks = num_blocks

    def _may_go_on(self, request: Request, decision: SchedulerOutput) -> bool:
        """Whether a decoding row that has no slot left, or no token to come, takes this step."""
        if _is_planned_out(request):
            return False
        why = self._packer.refusal(DECODE, 1, len(request.blocks) + 1)
        if why is not None:
            self._reject(request, why, decision)
            return False
        if not self._make_room(request, decision):
            return False
        self._grow(request, 1, decision)
        return True

    def _plan_prefills(self, decision: SchedulerOutput, budget: int) -> int:
        for request in self._prefilling:
            if budget == 0:
                break
            count = min(request.decode_from - request.computed, budget)
            why = self._packer.refusal(PREFILL, count, self._kv.blocks_for(request.computed))
            if why is not None:
                self._reject(request, why, decision)
                continue
            need = self._kv.blocks_for(request.computed + count) - len(request.blocks)
            if need > 0:
                if not self._make_room(request, decision):
                    continue
                self._grow(request, min(need, self._kv.pool.free), decision)
                count = min(count, len(request.blocks) * self._kv.block_size - request.computed)
            self._add_chunk(request, count, decision)
            budget -= count
        return budget

    def _admit(self, decision: SchedulerOutput, budget: int) -> None:
        """Let requests in from the line, strictly by rank, as long as their known tokens will fit.

        Only the first chunk's blocks are lent now. Nothing more needs to be set aside: there is
        budget left for this loop only if all who are in prefill have their blocks, or none is free.
        """
        kv = self._kv
        while budget > 0 and self._free_rows and (request := self.line.first()) is not None:
            if not self._has_seat(request):
                break
            prefix = kv.find_prefix(request)
            if kv.pays_to_wait(request, prefix):
                break
            cost = kv.cost(request, prefix)
            if self._decoding or self._prefilling or self._leaving:
                if cost > kv.pool.free - self._watermark:
                    break
            elif cost > kv.pool.free:
                self._fail(request, kv.blocks_for(request.known), decision)
                continue
            cached = len(prefix) * kv.block_size
            count = min(request.known - cached, budget)
            why = self._refusal(request, count, cached)
            if why is not None:
                self._reject(request, why, decision)
                continue
            self.line.remove(request)
            kv.start(request, prefix)
            kv.grow(request, kv.blocks_for(cached + count) - len(request.blocks))
            self._seat(request, cached, decision)
            self._add_chunk(request, count, decision)
            budget -= count

    def _has_seat(self, request: Request) -> bool:
        """Whether a free row is its to take: as long as others run, those that beams have just left
        are kept for their next tokens. In a full batch a search would else lose its rows with every
        token, and wait for all who came in between."""
        is_busy = self._decoding or self._prefilling or self._leaving
        kept = len(self._kept) if is_busy and not request.goes_on else 0
        return len(self._free_rows) > kept

    def _seat(self, request: Request, cached: int, decision: SchedulerOutput) -> None:
        if request.goes_on and self._kept:
            self._kept.popleft()
        request.row = self._free_rows.pop()
        request.state = RUNNING
        request.decode_from = request.known
        insort(self._prefilling, request, key=_rank)
        decision.new_requests.append(
            NewRequest(
                request.row,
                request.known_tokens(),
                request.num_prompt,
                cached,
                request.blocks.copy(),
                request.request_sampling(),
            )
        )
        if request.num_preemptions == 0:
            decision.started.append((request, cached))

    def _add_chunk(self, request: Request, count: int, decision: SchedulerOutput) -> None:
        context = self._kv.blocks_for(request.computed)
        request.computed += count
        request.last_step = decision.step
        samples = request.computed == request.decode_from
        decision.chunks.append(Chunk(request, count, context, samples))
        decision.num_tokens += count

    def _grow(self, request: Request, count: int, decision: SchedulerOutput) -> None:
        decision.grown_blocks.extend(self._kv.grow(request, count))
        decision.grown_requests.extend([request.row] * count)

    def _make_room(self, request: Request, decision: SchedulerOutput) -> bool:
        """Whether a block is free for it now. If not, the last in rank behind it gives way; with a
        plan in flight the blocks come back a step later, so it waits, and nobody else has to go."""
        while not self._kv.pool.free:
            if self._leaving:
                return False
            last = max(self._decoding[-1:] + self._prefilling[-1:], key=_rank)
            if _is_planned_out(last):
                return False
            if last is request:
                is_alone = len(self._decoding) + len(self._prefilling) == 1
                if is_alone and request.last_step <= self._collected:
                    self._fail(request, len(request.blocks) + 1, decision)
                return False
            self._preempt(last)
        return True

    def _preempt(self, request: Request) -> None:
        """Take everything from the last in rank but its tokens."""
        mine = self._decoding if self._decoding[-1:] == [request] else self._prefilling
        mine.pop()
        request.state = LEAVING
        request.num_preemptions += 1
        self._stats.preemptions += 1
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        if request.last_step > self._collected:
            self._leaving.append(request)
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        self._kv.release(request)
        if request.goes_on and request.state == ENDED:
            self._kept.append(self._collected + KEPT_STEPS)
        self._free_rows.append(request.row)
        self._freed_rows.append(request.row)
        request.row = -1
        if request.state == LEAVING:
            request.state = WAITING
            self.line.push(request)

    def _fail(self, request: Request, num_blocks: int, decision: SchedulerOutput) -> None:
        pool = self._kv.pool
        message = (
            f"the request needs {num_blocks} KV blocks of {self._kv.block_size} tokens, "
            f"the cache has {pool.size}"
        )
        decision.failed.append((request, message, None))
        self.drop(request)

    def _reject(self, request: Request, why: str, decision: SchedulerOutput) -> None:
        """End a request whose shape this server was told not to run."""
        decision.failed.append((request, why, ""))
        self.drop(request)

    def _refusal(self, request: Request, count: int, cached: int) -> str | None:
        """Why a request should not even begin, with a chunk of `count` behind `cached` tokens."""
        why = self._packer.refusal(PREFILL, count, self._kv.blocks_for(cached))
        if why is None and request.max_known > request.known + 1:
            why = self._packer.refusal(DECODE, 1, self._kv.blocks_for(request.known + 1))
        return why

    def _build(self, decision: SchedulerOutput) -> None:
        launches = []
        if decision.decodes:
            rows = [request.row for request in decision.decodes]
            if self._packer.must_split(len(rows), decision.num_decode_blocks):
                blocks = [self._kv.decode_blocks(request) for request in decision.decodes]
                launches += self._packer.decode_apart(rows, blocks)
            else:
                launches.append(self._packer.decode(rows, decision.num_decode_blocks))
            decision.num_tokens += len(rows)
        if decision.chunks:
            for launch, chunks in self._packer.prefill(decision.chunks):
                launches.append(launch)
                decision.prefills.extend(chunks)
        if launches:
            freed, self._freed_rows = self._freed_rows, []
            moves, self._moves = self._moves, []
            decision.plan = StepPlan(
                decision.step,
                launches,
                decision.new_requests,
                decision.grown_requests,
                decision.grown_blocks,
                freed,
                [source for source, _ in moves],
                [target for _, target in moves],
            )
            guided = [r for r in decision.decodes if r.guide is not None]
            chunks = [c for c in decision.prefills if c.samples]
            guided += [c.request for c in chunks if c.request.guide is not None]
            if guided:
                decision.late = add_masks(decision.plan, guided)

    def check(self) -> None:
        """Raise AssertionError, with the numbers, unless rows, blocks and states agree."""
        holders = self.holders
        self._kv.check(holders)
        rows = [request.row for request in holders]
        assert sorted(rows + self._free_rows) == list(range(self._num_rows)), (
            f"rows {sorted(rows)} are held and {sorted(self._free_rows)} free, "
            f"of {self._num_rows} in all"
        )
        for running in (self._decoding, self._prefilling):
            ranks = [request.rank for request in running]
            assert ranks == sorted(ranks), f"running out of rank: {ranks}"


def _is_planned_out(request: Request) -> bool:
    """Whether its last token is on its way, so that it ends with the plans in flight."""
    return request.computed >= max(request.max_known - 1, request.decode_from)
