"""CoreRig: a real EngineCore with a FakeExecutor, a ledger of its messages, and a clock that
advances by a millisecond at each read. CoreSettings: the settings of a CoreRig."""

from collections.abc import Sequence
from dataclasses import dataclass

from fake_executor import FakeExecutor, NextToken, worker_ready
from slow_model import Ledger, expected_output, hashed_token, raw

from config.buckets import BucketConfig
from config.engine import CacheConfig, EngineConfig, SchedulerConfig
from config.execution import ExecutionConfig, WarmupConfig
from config.params.offload import OffloadConfig
from config.params.sampling import SamplingParams
from config.params.speculation import SpeculationConfig
from engine.core.build import build_core
from engine.kv_cache.prefix_hashes import block_hashes
from engine.structured_output.grammar import Grammar
from engine.transport.messages import AddRequest, Resumption, StepOutput
from hpu.bucketing.bucket_table import BucketTable
from hpu.protocol import (
    PREFILL,
    BucketLimits,
    EncoderInput,
    ImagePlacement,
    OffloadFacts,
    StepPlan,
    WorkerReady,
)

MAX_STEPS = 5000


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """Settings of a CoreRig. By default, its cache and its batches are small."""

    num_blocks: int = 64
    block_size: int = 4
    max_model_len: int = 64
    max_num_seqs: int = 4
    budget: int = 32
    """Tokens per step."""
    depth: int = 2
    """Steps in flight."""
    policy: str = "fcfs"
    max_queue_len: int = 1000
    max_prefill_batch: int = 4
    prefix_caching: bool = True
    contiguous: bool = False
    defrag_threshold: int = 2
    widest_decode: int | None = None
    """Number of blocks of the largest prepared decode, if smaller than in the table."""
    buckets: str = "exact"
    on_unwarmed: str = "run"
    prepared: list[tuple[int, int, int, int]] | None = None
    """Prepared buckets; None: all buckets of the table."""
    num_deferred: int = 0
    vocab_size: int = 50
    max_tokens_per_step: int = 1
    prefill_launch_tokens: int = 0
    encoder_cache_tokens: int = 0
    whole_images: bool = False
    request_tiles: int = 0
    host_slots: int = 0
    max_files: int = 0
    swaps_only: bool = False
    load_s: float = 0.0
    fair_share: bool = False
    max_ttft_s: float = 0.0
    num_scheduler_steps: int = 1
    enable_chunked_prefill: bool = True

    def ready(self) -> WorkerReady:
        """The report of the rig's worker."""
        ready = worker_ready(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            contiguous=self.contiguous,
            vocab_size=self.vocab_size,
            encoder_cache_tokens=self.encoder_cache_tokens,
            whole_images=self.whole_images,
            request_tiles=self.request_tiles,
        )
        ready.num_deferred = self.num_deferred
        ready.max_tokens_per_step = self.max_tokens_per_step
        ready.prefill_launch_tokens = self.prefill_launch_tokens
        if self.host_slots:
            ready.offload = OffloadFacts(self.host_slots, self.load_s, self.max_files, b"")
        return ready

    def config(self) -> EngineConfig:
        offload = OffloadConfig()
        if self.host_slots:
            size = 0.0 if self.swaps_only else 1.0
            offload = OffloadConfig(swap_space=1.0, kv_offloading_size=size)
        return EngineConfig(
            model="none",
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.budget,
                max_prefill_batch=self.max_prefill_batch,
                policy=self.policy,
                max_inflight_steps=self.depth,
                max_queue_len=self.max_queue_len,
                fair_share=self.fair_share,
                max_ttft_s=self.max_ttft_s,
                num_scheduler_steps=self.num_scheduler_steps,
                enable_chunked_prefill=self.enable_chunked_prefill,
            ),
            cache=CacheConfig(enable_prefix_caching=self.prefix_caching),
            offload=offload,
            speculation=SpeculationConfig(
                speculative_model="[ngram]" if self.max_tokens_per_step > 1 else None,
                num_speculative_tokens=self.max_tokens_per_step - 1 or None,
            ),
            execution=ExecutionConfig(defrag_threshold=self.defrag_threshold),
            warmup=WarmupConfig(on_unwarmed_shape=self.on_unwarmed),
        )

    def table(self) -> BucketTable:
        limits = BucketLimits(
            self.block_size,
            self.max_model_len,
            self.max_num_seqs,
            self.budget,
            self.max_prefill_batch,
            self.num_blocks,
            self.prefix_caching,
            chunked_prefill=self.enable_chunked_prefill,
        )
        table = BucketTable.make(BucketConfig(strategy=self.buckets), limits)
        if self.prepared is not None:
            table.restrict(self.prepared)
        if (widest := self.widest_decode) is not None:
            table.restrict([b for b in table.buckets if b[0] == PREFILL or b[3] <= widest])
        return table


SMALL = CoreSettings()


class CoreRig:
    """An engine without processes. Checks the invariants after every step."""

    def __init__(
        self, settings: CoreSettings = SMALL, *, next_token: NextToken | None = None
    ) -> None:
        """`next_token`: None for `hashed_token`."""
        self.ready = settings.ready()
        self.budget = settings.budget
        table = settings.table()
        self.next_token = next_token or hashed_token(self.ready.vocab_size)
        self.executor = FakeExecutor(self.ready, settings.max_num_seqs, self.next_token)
        self.executor.table = table
        self.now = 0.0
        self.core = build_core(settings.config(), self.executor, self.ready, table, self._clock)
        self.ledger = Ledger()
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self.grammars: dict[int, Grammar] = {}
        self.steps = 0

    def _clock(self) -> float:
        self.now += 0.001
        return self.now

    def add(
        self,
        key: int,
        prompt: Sequence[int],
        *,
        priority: int = 0,
        salt: str = "",
        grammar: Grammar | None = None,
        images: Sequence[tuple[int, int, bytes]] = (),
        timeout_s: float = 0.0,
        tenant: int = 0,
        is_suspect: bool = False,
        resumed: Sequence[int] = (),
        **sampling: object,
    ) -> None:
        """Add a request, greedy by default. `images`: (offset, tokens, content) of each image.
        `is_suspect`: an engine crashed while computing its next token. `resumed`: tokens that
        another engine generated."""
        params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
        self.ledger.open(key)
        self.asked[key] = (list(prompt), params)
        if grammar is not None:
            self.grammars[key] = grammar
        message = AddRequest(key, raw(list(prompt)), params, priority, salt)
        message.timeout_s, message.tenant = timeout_s, tenant
        if is_suspect or resumed:
            message.resumption = Resumption(raw(list(resumed)), is_suspect=is_suspect)
        message.images = [ImagePlacement(name, start, count) for start, count, name in images]
        sizes = {name: count for _, count, name in images}
        message.encoded_images = [EncoderInput(name, n, []) for name, n in sizes.items()]
        self.send(message, grammar)

    def send(self, message: AddRequest, grammar: Grammar | None = None) -> None:
        hashes = block_hashes(
            *(message.prompt, self.ready.block_size, message.cache_salt),
            images=message.images,
            all_see_images=self.ready.request_tiles > 0,
        )
        self.core.add_request(message, hashes, grammar)

    def abort(self, *keys: int) -> None:
        self.core.abort(keys)
        for key in keys:
            self.ledger.abort(key)

    def step(self) -> list[tuple[int, StepOutput]]:
        messages = self.core.step()
        self.steps += 1
        self.ledger.take(messages)
        self.core.check()
        return messages

    def run(self, steps: int = MAX_STEPS) -> None:
        """Run at most `steps` steps, or until the core has no work left."""
        for _ in range(steps):
            if not self.core.has_work:
                return
            self.step()
        assert steps < MAX_STEPS, f"still at work after {steps} steps"

    @property
    def plans(self) -> list[StepPlan]:
        return self.executor.plans

    def tokens(self, key: int) -> list[int]:
        return self.ledger.requests[key].tokens

    def reason(self, key: int) -> str | None:
        finish = self.ledger.requests[key].finish
        return None if finish is None else finish.reason

    def error(self, key: int) -> str:
        finish = self.ledger.requests[key].finish
        assert finish is not None and finish.error is not None, f"key {key} has no error"
        return finish.error

    def expected(self, key: int) -> tuple[list[int], str, int | None]:
        prompt, params = self.asked[key]
        grammar = self.grammars.get(key)
        return expected_output(prompt, params, self.ready, self.next_token, grammar)

    def check_budget(self) -> None:
        """Assert that no step computed more tokens than its budget, including drafts; if decodes
        leave less than a block, prompts had at most a block."""
        for plan in self.plans:
            num_decodes = num_prompt_tokens = 0
            for launch in plan.launches:
                if launch.phase == PREFILL:
                    num_prompt_tokens += sum(launch.query_lens)
                else:
                    num_decodes += len(launch.req_indices)
            left = self.budget - num_decodes * self.ready.max_tokens_per_step
            least = min(self.ready.block_size, self.budget - num_decodes)
            assert num_prompt_tokens <= max(left, least, 0), (
                f"plan {plan.step} has {num_decodes} decodes and {num_prompt_tokens} prompt tokens"
            )

    def check_output(self, key: int) -> None:
        """Assert that a finished request has the tokens of a single run, and an aborted request a
        prefix of them."""
        tokens, reason, stop_token = self.expected(key)
        request = self.ledger.requests[key]
        if request.is_aborted:
            assert request.tokens == tokens[: len(request.tokens)]
            return
        assert request.finish is not None, f"key {key} never finished"
        found = (request.tokens, request.finish.reason, request.finish.stop_token)
        assert found == (tokens, reason, stop_token), f"key {key}: {found}"
        prompt, params = self.asked[key]
        if params.logprobs is not None:
            assert request.logprob_ids == request.tokens
        if params.prompt_logprobs is not None and reason != "error":
            assert request.scored == prompt[1:]
