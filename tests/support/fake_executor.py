"""FakeExecutor: workers in plain Python that record the contents of every KV slot. Fails on any
read of a slot whose contents differ from the request's history."""

from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.executors.base import Executor, Report
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import (
    DECODE,
    PREFILL,
    SLEEP,
    BlocksFetched,
    BucketLimits,
    DropFiles,
    FetchBlocks,
    FromWorker,
    GrammarMasks,
    ImagePlacement,
    Launch,
    Logprobs,
    NewRequest,
    RequestSampling,
    StepPlan,
    StepResult,
    ToWorker,
    WarmedBuckets,
    WarmupProgress,
    WorkerCall,
    WorkerReady,
)

NextToken = Callable[[int, int, RequestSampling], int]
"""Function of (fingerprint of the whole history, tokens generated so far, sampling) that returns
the next token."""


WRONG = -2
"""Contents of a slot that was changed on the host."""


def fingerprint(before: int, token: int) -> int:
    """Hash of a history that ends with `token`; depends on every token, their order and their
    number."""
    return (before * 6364136223846793005 + token * 1442695040888963407 + 1) % (2**61 - 1)


@dataclass
class LiveRequest:
    """The worker's record of a live request."""

    tokens: list[int]
    num_prompt: int
    computed: int
    blocks: list[int]
    sampling: RequestSampling
    marks: list[int] = field(default_factory=list)
    """Fingerprint of the history up to each token."""
    images: list[ImagePlacement] = field(default_factory=list)
    is_wrong: bool = False
    """Whether the request has read a block with wrong contents, so that its results are wrong,
    too."""

    def image_at(self, position: int) -> ImagePlacement | None:
        inside = (i for i in self.images if i.offset <= position < i.offset + i.length)
        return next(inside, None)

    def append(self, token: int) -> None:
        image = self.image_at(len(self.tokens))
        self.tokens.append(token)
        if image is not None:
            token += 1000 + int.from_bytes(image.content[:6], "little")
        self.marks.append(fingerprint(self.marks[-1] if self.marks else 7, token))


class FakeExecutor(Executor):
    """An Executor whose tokens are a pure function of the history in its KV cache. A decode returns
    1 to `ready.max_tokens_per_step` tokens, depending on the history; with a grammar 1."""

    def __init__(self, ready: WorkerReady, max_num_reqs: int, next_token: NextToken) -> None:
        self.ready = ready
        self.max_num_reqs = max_num_reqs
        self.table: BucketTable | None = None
        """Prepared buckets that launches must use; None: launches may have any shape."""
        self.next_token = next_token
        self.plans: list[StepPlan] = []
        self.requests: dict[int, LiveRequest] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.max_in_flight = 0
        self.collected = 0
        self.early_every = 0
        """Period of early results: every `early_every`-th time that the engine asks, a result is
        available before the next plan. 0: never."""
        self._asked = 0
        self.warmed: list[WarmedBuckets] = []
        """Messages to be received next."""
        self.counters: dict[str, float] = {}
        """Counters that the next results report."""
        self.collected_before: list[int] = []
        """Number of collected results when each plan was submitted."""
        self._masks: dict[int, npt.NDArray[np.uint8]] = {}
        """Masks of the current plan by request index, for masked requests that sample in it."""
        self.masks: list[GrammarMasks] = []
        """Masks that arrived after their plans."""
        self._in_flight: deque[bytes] = deque()
        self._lacking: StepPlan | None = None
        """The newest plan, while its late requests have no masks."""
        self.calls: list[tuple[str, int]] = []
        self.sleeps = False
        self.host: dict[int, list[int]] = {}
        """Contents of each slot in host memory, with `ready.offload`."""
        self.files: dict[bytes, list[int]] = {}
        self.dropped: set[bytes] = set()
        """Files that the engine asked to delete."""
        self.bad_files: set[bytes] = set()
        """Files that are found to be corrupt."""
        self.corrupt_every = 0
        """Period of corrupt blocks: every `corrupt_every`-th block loaded from the host has wrong
        contents. 0: none."""
        self.num_loaded = 0
        self.fetch_delay = 0
        """Number of calls of `take_fetched` that return no answer before the answer is
        available."""
        self._fetches: deque[tuple[FetchBlocks, int]] = deque()
        """Reads of files, with the number of plans submitted before each."""
        self._late_by = 0
        self.embeddings: dict[bytes, int] = {}
        """Number of embeddings of each image in the encoder cache, by content hash."""
        self._report: Report = lambda progress: None
        self.handlers: dict[type, Callable[[Any], None]] = {
            StepPlan: self.submit,
            GrammarMasks: self.submit_masks,
            FetchBlocks: self.fetch_blocks,
            DropFiles: self.drop_files,
            WorkerCall: lambda call: None,
        }
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(StepPlan).decode

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def start(self, report: Report) -> WorkerReady:
        self._report = report
        report(WarmupProgress("warmup", 1, 1))
        return self.ready

    def send(self, message: ToWorker) -> None:
        self.handlers[type(message)](message)

    def receive(self, *, waits: bool = False) -> list[FromWorker]:
        """The next result, awaited if requested; otherwise the file blocks read so far."""
        if self._in_flight and (waits or self.has_result()):
            return [self.collect()]
        warmed, self.warmed = self.warmed, []
        return [*warmed, *self.take_fetched()]

    def submit(self, plan: StepPlan) -> None:
        assert not self.sleeps, f"plan {plan.step} comes while it sleeps"
        assert plan.launches, f"plan {plan.step} has nothing to launch"
        assert self._lacking is None, f"plan {plan.step} comes before the masks it waits for"
        self._lacking = plan if plan.deferred_requests else None
        assert plan.step == len(self.plans), f"plan {plan.step} comes as number {len(self.plans)}"
        self.plans.append(plan)
        self.collected_before.append(self.collected)
        # Run at collection, from an encoded copy: otherwise, a plan that is changed after
        # submission would not be noticed.
        self._in_flight.append(self._encode(plan))
        self.max_in_flight = max(self.max_in_flight, len(self._in_flight))

    @property
    def lacks_masks(self) -> bool:
        """Whether the oldest plan in flight waits for masks."""
        return self._lacking is not None and len(self._in_flight) == 1

    def submit_masks(self, masks: GrammarMasks) -> None:
        assert self.lacks_masks, f"masks for {masks.step} when {len(self._in_flight)} are in flight"
        assert self._lacking is not None and masks.step == self._lacking.step
        late = set(self._lacking.deferred_requests)
        assert set(masks.req_indices) <= late, f"{masks.req_indices} are not all in {late}"
        self._lacking = None
        self.masks.append(masks)

    def has_result(self) -> bool:
        """False by default, so that plans are made one step ahead; see `early_every`."""
        self._asked += 1
        is_early = self.early_every > 0 and self._asked % self.early_every == 0
        return is_early and len(self._in_flight) > 0 and not self.lacks_masks

    def collect(self) -> StepResult:
        assert not self.lacks_masks, f"result {self.collected} is asked for, and has no masks"
        self.collected += 1
        return self._run(self._decode(self._in_flight.popleft()))

    def call(self, name: str, level: int = 0) -> str:
        """Records the call in `calls`. A sleeping executor forgets its state and refuses plans."""
        assert not self._in_flight, f"{name} with {len(self._in_flight)} plans in flight"
        self.calls.append((name, level))
        if name == SLEEP:
            self.requests.clear()
            self.slots.clear()
            self.host.clear()
            self.embeddings.clear()
            self.sleeps = True
        return ""

    def wake_up(self) -> WorkerReady:
        assert self.sleeps, "it is awake"
        self.sleeps = False
        return self.start(self._report)

    def close(self) -> None:
        self._in_flight.clear()

    def _run(self, plan: StepPlan) -> StepResult:
        for req_index in plan.freed_requests:
            assert req_index in self.requests, f"request {req_index} is freed, and nobody is in it"
            del self.requests[req_index]
        corrupt = self._copy_blocks(plan)
        self._move(dict(zip(plan.moved_from, plan.moved_to, strict=True)))
        for new in plan.new_requests:
            self._enter(new)
        for req_index, block in zip(plan.grown_requests, plan.grown_blocks, strict=True):
            self._append_block(self.requests[req_index], block)
        self._encode_images(plan)
        self._masks = _masks(plan.masked_requests, plan.masks)
        if plan.deferred_requests:
            late = self.masks[-1]
            assert late.step == plan.step and not set(late.req_indices) & set(plan.masked_requests)
            self._masks.update(_masks(late.req_indices, late.masks))
            # Requests that ended meanwhile may sample any token.
            anything = np.full(-(-self.ready.vocab_size // 8), 255, np.uint8)
            self._masks.update(
                dict.fromkeys(set(plan.deferred_requests) - set(late.req_indices), anything)
            )
        used = Counter(index for launch in plan.launches for index in launch.req_indices)
        assert max(used.values(), default=1) == plan.decode_steps, (
            f"a request is launched {max(used.values())} times, not {plan.decode_steps}"
        )
        assert plan.decode_steps == 1 or all(x.phase == DECODE for x in plan.launches)
        result = StepResult(plan.step, [], seconds=[0.001] * len(plan.launches))
        result.counters, self.counters = self.counters, {}
        result.corrupt_loads = corrupt
        for launch in plan.launches:
            if not launch.req_indices:
                continue  # Padding launch for other engines.
            self._check_bucket(launch)
            if launch.phase == PREFILL:
                self._prefill(launch, result)
            else:
                self._decode_rows(launch, result)
        assert not self._masks, f"requests {list(self._masks)} have a mask and did not sample"
        if plan.decode_steps > 1:
            _join(result, [index for launch in plan.launches for index in launch.req_indices])
        return result

    def _copy_blocks(self, plan: StepPlan) -> list[int]:
        """Copy the plan's blocks; returns indices of loads with wrong contents."""
        corrupt = []
        size = self.ready.block_size
        # Plans submitted before a read have run when the read begins.
        number = self.collected - 1
        reserved = {
            slot for fetch, first in self._fetches if first <= number for slot in fetch.slots
        }
        names = plan.stored_hashes or [b""] * len(plan.stored_blocks)
        for block, slot, name in zip(plan.stored_blocks, plan.stored_slots, names, strict=True):
            assert slot not in reserved, f"slot {slot} is stored to while a file is read to it"
            self.host[slot] = [self.slots[block, offset] for offset in range(size)]
            if name:
                self.files[name] = self.host[slot]
        for index, slot in enumerate(plan.loaded_slots):
            block = plan.loaded_blocks[index]
            assert slot not in reserved, f"slot {slot} is loaded while a file is read to it"
            holders = sum(block in other.blocks for other in self.requests.values())
            assert not holders, f"block {block} is loaded to, and {holders} requests hold it"
            for offset, mark in enumerate(self.host[slot]):
                self.slots[block, offset] = mark
            self.num_loaded += 1
            if self.corrupt_every and self.num_loaded % self.corrupt_every == 0:
                self.slots[block, 0] = WRONG
                corrupt.append(index)
        return corrupt

    def fetch_blocks(self, message: FetchBlocks) -> None:
        # Plans in flight were submitted before, and run before.
        assert self.ready.offload.max_files and message.hashes
        self._fetches.append((message, self.collected + len(self._in_flight)))
        self._late_by = self.fetch_delay

    def drop_files(self, message: DropFiles) -> None:
        self.dropped.update(message.hashes)
        for name in message.hashes:
            self.files.pop(name, None)

    def take_fetched(self) -> list[BlocksFetched]:
        if not self._fetches or self.collected < self._fetches[0][1] or self._late_by:
            self._late_by = max(self._late_by - 1, 0)
            return []
        message, _ = self._fetches.popleft()
        answer = BlocksFetched(0.001)
        for index, (name, slot) in enumerate(zip(message.hashes, message.slots, strict=True)):
            if name not in self.files:
                answer.missing.append(index)
            elif name in self.bad_files:
                answer.corrupt.append(index)
                self.host[slot] = [-1] * self.ready.block_size
            else:
                self.host[slot] = self.files[name]
        return [answer]

    def _encode_images(self, plan: StepPlan) -> None:
        for content in plan.freed_images:
            assert content in self.embeddings, "an image is freed that is not there"
            del self.embeddings[content]
        for image in plan.encoded_images:
            assert image.content not in self.embeddings, "an image is encoded that is there"
            self.embeddings[image.content] = image.num_embeddings
        total = sum(self.embeddings.values())
        assert total <= self.ready.encoder_cache_tokens, (
            f"{total} embeddings, of {self.ready.encoder_cache_tokens}"
        )

    def _check_images(self, request: LiveRequest, count: int) -> None:
        stop = request.computed + count
        for image in request.images:
            end = image.offset + image.length
            if self.ready.request_tiles:
                assert image.content in self.embeddings, "tokens see an image that is not encoded"
            elif image.offset < stop and request.computed < end:
                assert image.content in self.embeddings, (
                    f"tokens {request.computed} to {stop - 1} have an image that is not encoded"
                )
                assert end <= stop or not self.ready.whole_images, (
                    f"an image with tokens {image.offset} to {end - 1} is cut at {stop}"
                )

    def _move(self, moves: dict[int, int]) -> None:
        for request in self.requests.values():
            taken = set(request.blocks) & set(moves.values())
            assert not taken, f"blocks {taken} are moved to, and a request holds them"
            request.blocks = [moves.get(block, block) for block in request.blocks]
        size = self.ready.block_size
        moved = {
            (target, offset): self.slots.pop((source, offset), -1)
            for source, target in moves.items()
            for offset in range(size)
        }
        self.slots.update(moved)

    def _enter(self, new: NewRequest) -> None:
        assert 0 <= new.req_index < self.max_num_reqs, (
            f"request {new.req_index} of {self.max_num_reqs}"
        )
        assert new.req_index not in self.requests, f"request {new.req_index} is taken"
        tokens = array("I")
        tokens.frombytes(bytes(new.tokens))
        assert 0 <= new.num_computed_tokens < len(tokens), (
            f"{new.num_computed_tokens} of {len(tokens)} computed"
        )
        request = LiveRequest([], new.num_prompt_tokens, new.num_computed_tokens, [], new.sampling)
        request.images = new.images
        for token in tokens:
            request.append(token)
        for block in new.blocks:
            self._append_block(request, block)
        self.requests[new.req_index] = request
        self._read(request)

    def _append_block(self, request: LiveRequest, block: int) -> None:
        assert 0 <= block < self.ready.num_blocks, f"block {block} of {self.ready.num_blocks}"
        assert block not in request.blocks, f"block {block} is allocated twice to one request"
        request.blocks.append(block)

    def _read(self, request: LiveRequest) -> None:
        """Check all context of a request, slot by slot."""
        size = self.ready.block_size
        for position in range(request.computed):
            place = (request.blocks[position // size], position % size)
            found = self.slots.get(place)
            request.is_wrong |= found == WRONG
            assert found in (WRONG, request.marks[position]) or request.is_wrong, (
                f"slot {place} for position {position} holds the wrong history"
            )

    def _write(self, request: LiveRequest, count: int) -> None:
        size = self.ready.block_size
        for position in range(request.computed, request.computed + count):
            block = request.blocks[position // size]
            num_references = sum(block in other.blocks for other in self.requests.values())
            assert num_references == 1, (
                f"block {block} is written, and {num_references} requests hold it"
            )
            mark = WRONG if request.is_wrong else request.marks[position]
            self.slots[block, position % size] = mark
        request.computed += count

    def _check_bucket(self, launch: Launch) -> None:
        batch, query, blocks = launch.bucket
        requests = [self.requests[req_index] for req_index in launch.req_indices]
        assert len(requests) <= batch, f"{len(requests)} requests in a batch of {batch}"
        size = self.ready.block_size
        if launch.phase == PREFILL:
            need = max(-(-request.computed // size) for request in requests)
            assert max(launch.query_lens) <= query, (
                f"{launch.query_lens} tokens in a query of {query}"
            )
        else:
            need = sum(len(request.blocks) for request in requests)
            if self.ready.contiguous:
                need = 1 + max(block for request in requests for block in request.blocks)
                assert blocks <= self.ready.num_blocks, f"{blocks} blocks of a smaller cache"
            assert query == 1 and not launch.query_lens and not launch.samples
        assert need <= blocks, f"{need} blocks in a bucket of {blocks}"
        if self.table is not None and not self.table.is_exact:
            shape = (launch.phase, *launch.bucket)
            assert shape in self.table.buckets, f"{shape} was never prepared"

    def _prefill(self, launch: Launch, result: StepResult) -> None:
        for req_index, count, samples in zip(
            launch.req_indices, launch.query_lens, launch.samples, strict=True
        ):
            request = self.requests[req_index]
            left = len(request.tokens) - request.computed
            assert 0 < count <= left, f"{count} tokens of {left} known ones"
            assert samples == (count == left), f"{count} of {left} tokens, samples is {samples}"
            self._read(request)
            self._check_images(request, count)
            first = request.computed
            self._write(request, count)
            if request.sampling.num_prompt_logprobs >= 0:
                nexts = request.tokens[first + 1 : min(first + count + 1, request.num_prompt)]
                scores = _scores(request.sampling.num_prompt_logprobs, nexts, first)
                result.prompt_logprobs.append((req_index, scores))
            if samples:
                self._sample(req_index, result)
                if self.ready.max_tokens_per_step > 1:
                    result.token_counts.append(1)

    def _decode_rows(self, launch: Launch, result: StepResult) -> None:
        for req_index in launch.req_indices:
            request = self.requests[req_index]
            known = len(request.tokens)
            assert request.computed == known - 1, (
                f"{request.computed} of {known} tokens are computed"
            )
            assert known > request.num_prompt, "a decode follows a sampled token"
            if self.ready.max_tokens_per_step == 1:
                self._read(request)
                self._write(request, 1)
                self._sample(req_index, result)
            else:
                self._decode_several(req_index, request, result)

    def _decode_several(self, req_index: int, request: LiveRequest, result: StepResult) -> None:
        """Sample as many tokens as the request's blocks have slots. A request that ended with
        earlier results may have no slot: it reads and writes nothing."""
        before = len(result.tokens)
        count = (
            1 if request.sampling.masked else 1 + request.marks[-1] % self.ready.max_tokens_per_step
        )
        for _ in range(min(count, len(request.blocks) * self.ready.block_size - request.computed)):
            self._read(request)
            self._write(request, 1)
            self._sample(req_index, result)
            if result.tokens[-1] < 0:
                break
        if len(result.tokens) == before:
            result.tokens.append(0)
            self._masks.pop(req_index, None)
        result.token_counts.append(len(result.tokens) - before)

    def _sample(self, req_index: int, result: StepResult) -> None:
        request = self.requests[req_index]
        generated = len(request.tokens) - request.num_prompt
        token = self.next_token(request.marks[-1], generated, request.sampling)
        if request.is_wrong and token >= 0:
            token = (token + 1) % self.ready.vocab_size
        if request.sampling.masked:
            bits = np.unpackbits(self._masks.pop(req_index), bitorder="little")
            allowed = np.flatnonzero(bits[: self.ready.vocab_size])
            if request.sampling.allowed_token_ids is not None:
                allowed = np.intersect1d(allowed, request.sampling.allowed_token_ids)
            token = int(allowed[token % len(allowed)])
        if request.sampling.num_logprobs >= 0:
            scores = _scores(request.sampling.num_logprobs, [token], len(request.tokens))
            result.logprobs.append((len(result.tokens), scores))
        result.tokens.append(token)
        request.append(max(token, 0))


def _join(result: StepResult, req_indices: list[int]) -> None:
    """Group the tokens by request; they are in the order of the launches."""
    order = sorted(range(len(req_indices)), key=lambda place: req_indices.index(req_indices[place]))
    result.tokens = [result.tokens[place] for place in order]
    result.token_counts = [req_indices.count(index) for index in dict.fromkeys(req_indices)]
    result.logprobs = sorted((order.index(place), scores) for place, scores in result.logprobs)


def _masks(req_indices: list[int], masks: memoryview) -> dict[int, npt.NDArray[np.uint8]]:
    words = np.frombuffer(masks, dtype=np.uint8).reshape(len(req_indices) or 1, -1)
    return dict(zip(req_indices, words, strict=False))


def _scores(k: int, tokens: list[int], first: int) -> Logprobs:
    """Fake log-probabilities that encode their token and position."""
    width = k + 1
    ids = array("i", [token for token in tokens for _ in range(width)])
    values = array("f", [-float(first + i) for i in range(len(tokens)) for _ in range(width)])
    ranks = array("i", [1] * len(tokens))
    return Logprobs(k, *(memoryview(column.tobytes()) for column in (ids, values, ranks)))


def worker_ready(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    vocab_size: int = 50,
    eos_token_ids: tuple[int, ...] = (2,),
    contiguous: bool = False,
    encoder_cache_tokens: int = 0,
    whole_images: bool = False,
    request_tiles: int = 0,
) -> WorkerReady:
    """The report of a worker with a small model."""
    return WorkerReady(
        num_blocks,
        block_size,
        max_model_len,
        vocab_size,
        eos_token_ids,
        buckets=[],
        device="fake",
        dtype="float32",
        weight_bytes=0,
        kv_bytes=0,
        graph_bytes=0,
        total_bytes=0,
        load_s=0.0,
        warmup_s=0.0,
        bucket_limits=BucketLimits(
            block_size, max_model_len, 256, 8192, 4, num_blocks, prefix_caching=not contiguous
        ),
        contiguous=contiguous,
        encoder_cache_tokens=encoder_cache_tokens,
        whole_images=whole_images,
        request_tiles=request_tiles,
    )
