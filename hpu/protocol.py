"""Messages between an engine and its workers: columns of plain values, no tensors.

A worker keeps the state of each live request at its `req_index`, so a plan carries only changes.
Changes apply in this order: freed requests, stored blocks, loaded blocks, moved blocks, new
requests, images, sampled tokens, bitmasks, grown blocks, launches in sequence. Copies of adapters
to LoRA slots come first.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from config.engine import SchedulerConfig
from config.params.pooling import PoolingFacts
from config.params.token_ids import TokenIds

PREFILL = 0
DECODE = 1

Shape = tuple[int, int, int]
"""(sequences, query tokens per sequence, KV blocks); merged prefills: see Launch.bucket."""

Bucket = tuple[int, int, int, int]
"""(phase, sequences, query tokens per sequence, KV blocks); see Shape."""

NO_MASKS = memoryview(b"")
NO_SLOT = -1
"""LoRA slot of a request without an adapter."""
TOKENS_PER_WORD = 32
"""Tokens per word of a bitmask."""
TOKEN_BYTES = 4
"""Bytes of a token in a message: uint32, little-endian."""


class Ranks(NamedTuple):
    """Rank of this process in its engine, and index of the engine among the engines that share
    experts."""

    world_size: int = 1
    """Number of ranks of the engine."""
    rank: int = 0
    """Rank in the engine."""
    init_method: str = ""
    """Rendezvous address in torch.distributed form: tcp://host:port, file://path, or env:// for
    ranks that an external launcher started."""
    timeout_s: float = 1800.0
    """Maximum wait in seconds for other ranks, at the start and in each collective."""
    local_rank: int | None = None
    """Index of this rank's device on its host; None: `rank`."""
    engine: int = 0
    num_engines: int = 1
    """Number of engines that step together because experts are distributed over the ranks of all of
    them."""

    @property
    def global_size(self) -> int:
        """Number of ranks of all engines, which form the world."""
        return self.world_size * self.num_engines

    @property
    def global_rank(self) -> int:
        """Rank in the world; the ranks of an engine are adjacent."""
        return self.engine * self.world_size + self.rank

    @property
    def device_index(self) -> int:
        """`local_rank`; defaults to `rank`, for a single host."""
        return self.rank if self.local_rank is None else self.local_rank


SINGLE_RANK = Ranks()
"""Ranks of a process that runs alone."""


class RequestSampling(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Sampling parameters of a request."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    end_token_ids: TokenIds = ()
    """Tokens banned while fewer than `min_tokens` were generated (end tokens, stop_token_ids)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: TokenIds | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_logprobs: int = -1
    """-1: no logprobs; k: logprobs of the sampled token and of the k most likely tokens."""
    num_prompt_logprobs: int = -1
    masked: bool = False
    """Whether the request has a grammar: each of its samples needs a bitmask."""


class InputTensor(msgspec.Struct, array_like=True, gc=False):
    """Input tensor of the vision tower."""

    name: str
    """Output of the image processor, such as pixel_values."""
    dtype: str
    """Name of the torch dtype: float32, int64 or bool."""
    shape: tuple[int, ...]
    data: memoryview
    """Row-major, little-endian."""


class ImagePlacement(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Position of an image in a request. The images of a request are sorted by offset."""

    content: bytes
    """Hash of everything that the embeddings depend on; equal images are encoded once."""
    offset: int
    """Index in the prompt of the image's first token."""
    length: int
    """Tokens from the image's first to its last token. Tokens with the model's image token id take
    the embeddings in order; other tokens in the range are text, such as row ends."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """Time, height and width in tokens; used only for M-RoPE."""
    time_step: float = 1.0
    """M-RoPE position increment per temporal grid step; accumulated positions are floored."""


class EncoderInput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """An image for the vision tower to encode."""

    content: bytes
    num_embeddings: int
    """Rows that the tower computes: one per image token or, for cross-attention layers, one per
    tile."""
    tensors: list[InputTensor]


class NewRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request that starts at `req_index`: new, or resumed, such as after a preemption."""

    req_index: int
    tokens: memoryview
    """uint32, little-endian: the prompt, then the tokens generated so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose keys and values are already in `blocks` (prefix cache hit)."""
    blocks: list[int]
    sampling: RequestSampling
    lora_slot: int = NO_SLOT
    """LoRA slot of the request's adapter."""
    images: list[ImagePlacement] = []
    is_private: bool = False
    """Whether the output must not become a source of drafts for other requests: set for requests
    with a cache salt."""


class Text(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """An input of a pooling model, and the vectors to return."""

    tokens: memoryview
    """uint32, little-endian."""
    by_token: bool = False
    """Return a vector per token instead of a vector for the whole text."""
    normalizes: bool = False
    """Normalize vectors to length 1; for a model with a head, apply its activation to the
    logits."""
    dimensions: int = 0
    """Dimensions to keep of each vector, cut before normalization; 0: all."""
    num_first: int = 0
    """Number of leading tokens of type 0; later tokens have type 1. 0: all tokens have type 0."""
    num_skipped: int = 0
    """Number of leading tokens that are not pooled."""
    lora_slot: int = NO_SLOT
    """LoRA slot of the text's adapter."""


class Launch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A forward pass in a bucket. Results are in the order of `req_indices`.

    Prefill: request i computes its next `query_lens[i]` tokens, and samples if they are its last
    (`samples[i]`). Decode: each request computes its last sampled token, and its drafts if there
    are any, and always samples; `query_lens` and `samples` are empty. For a pooling model every
    launch is a prefill, `req_indices` are indices into the plan's `texts`, and no request samples.

    A launch without requests computes only padding, for the experts of other engines.
    """

    phase: int
    bucket: Shape
    """(batch, query, blocks), padded up to a bucket. Prefill: `blocks` is the cached context per
    request; in a merged prefill batch is 1, and query and blocks are totals over all requests.
    Decode: query is 1, and blocks is the total over all requests or, if the worker reads its cache
    as a slice, the highest block of any request plus 1."""
    req_indices: list[int]
    query_lens: list[int] = []
    samples: list[bool] = []


class SampledTokens(msgspec.Struct, array_like=True, gc=False):
    """Last tokens of the decoding requests, in the order of the plan's decodes, for pipeline stages
    that did not sample them."""

    num_tokens: list[int]
    """Number of tokens of each request; its last token is not computed yet."""
    last_tokens: memoryview
    """(requests, maximum tokens per step) uint32, little-endian: last tokens, right-aligned and
    padded with 0."""
    drafts: list[list[int]]
    """Draft tokens that the decode of each request verifies (see StepResult.drafts)."""


class StepPlan(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=1):
    """A step. Each plan gets exactly one StepResult, in order."""

    step: int
    launches: list[Launch]
    new_requests: list[NewRequest] = []
    grown_requests: list[int] = []
    grown_blocks: list[int] = []
    """Block grown_blocks[i] is appended to the block table of grown_requests[i]."""
    freed_requests: list[int] = []
    moved_from: list[int] = []
    moved_to: list[int] = []
    """Block moved_from[i] is copied to moved_to[i], which replaces it in every block table. All
    moves are simultaneous; no block table contains a moved_to block before."""
    masked_requests: list[int] = []
    """Requests with a grammar that sample in this plan and whose last token the engine has
    received."""
    masks: memoryview = NO_MASKS
    """(masked_requests, words) int32 little-endian: a bit per token, set if the token may come
    next. With `mask_counts`: (sum of mask_counts, words)."""
    deferred_requests: list[int] = []
    """The other requests with a grammar that sample in this plan. A launch that contains such a
    request samples when `GrammarMasks` arrives, before the next plan. The first such launch runs
    its forward pass immediately, after all launches that are not deferred."""
    texts: list[Text] = []
    """Whole inputs of the launches of a pooling model; requests and blocks are then empty."""
    lora_slots: list[int] = []
    lora_adapters: list[str] = []
    """Adapter lora_adapters[i], which the worker has read, is copied to slot lora_slots[i] before
    the launches. No request with another adapter uses that slot."""
    mask_counts: list[int] = []
    """Number of bitmasks of each of `masked_requests`: for its next token, and for the tokens after
    its first drafts (StepResult.drafts). Empty: a single bitmask each."""
    freed_images: list[bytes] = []
    """Content hashes of images whose embeddings are freed, before new images are encoded."""
    encoded_images: list[EncoderInput] = []
    """Images to encode before the launches. Embeddings stay until they are freed: a launch contains
    only tokens of images that are encoded and not freed."""
    known: SampledTokens | None = None
    """Set only when speculation is combined with pipeline stages."""
    stored_blocks: list[int] = []
    stored_slots: list[int] = []
    """Block stored_blocks[i] is copied to slot stored_slots[i] of host memory, before any write of
    this plan to the block."""
    stored_hashes: list[bytes] = []
    """Hashes of `stored_blocks`, which are the names of their files. Used only if blocks are stored
    in files."""
    loaded_slots: list[int] = []
    loaded_blocks: list[int] = []
    """Slot loaded_slots[i] is copied to block loaded_blocks[i], after the stores and before the
    launches."""
    decode_steps: int = 1
    """Maximum decodes of a request in this plan. Above 1, the launches are decodes in rounds: each
    round computes the tokens that the previous round sampled, which stay on the device."""


class GrammarMasks(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=9):
    """Bitmasks of deferred requests. Exactly one message follows each plan with deferred requests,
    once the previous result is known.

    A deferred request that is not listed has finished, and its sample is dropped.
    """

    step: int
    """Step of the plan."""
    req_indices: list[int]
    masks: memoryview
    """(req_indices, words); see StepPlan.masks."""
    mask_counts: list[int] = []
    """See StepPlan.mask_counts."""


class Logprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of `len(ranks) / 4` positions: the sampled token or the prompt token, then
    the `k` most likely.

    `ids` is int32 and `values` float32, both (positions, k + 1) and little-endian; `ranks` is int32
    (positions,): 1 for the most likely token. Values are the log-softmax of the raw logits, for
    sampled tokens as --logprobs-mode says.
    """

    k: int
    ids: memoryview
    values: memoryview
    ranks: memoryview


class StepResult(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=2):
    """Results of a step, in the plan's order. A request that is decoded several times
    (StepPlan.decode_steps) is listed once, at its first launch, with all its tokens.

    `tokens` holds the tokens of all sampling requests, `token_counts[i]` tokens of the i-th. A
    token of -1: the largest score is not finite.
    """

    step: int
    tokens: list[int]
    logprobs: list[tuple[int, Logprobs]] = []
    """(index into tokens, logprobs of that position) of requests with logprobs."""
    prompt_logprobs: list[tuple[int, Logprobs]] = []
    """(req_index, logprobs of the prompt tokens that follow the positions of this chunk) of
    requests with prompt logprobs."""
    seconds: list[float] = []
    """Device time of each launch in seconds, sampling included."""
    host_s: float = 0.0
    counters: dict[str, float] = {}
    """Worker counters that changed (see engine/stats.py)."""
    vectors: list[tuple[int, memoryview]] = []
    """Results of a pooling model, in the order of the launches' texts: (number of vectors, float32
    little-endian); -1 vectors if any value is not finite."""
    token_counts: list[int] = []
    """Number of tokens of each sampling request, in the order of `tokens`; empty: every request has
    exactly one token. Near the end, so that an empty column takes no bytes on the wire."""
    drafts: list[tuple[int, list[int]]] = []
    """(index of a sampling request, draft tokens that its next decode may verify). Sent for
    requests with a grammar, so that the engine can send bitmasks. If only the last of several
    pipeline stages can draft, sent for all requests: the plan of that decode returns the drafts to
    the stages."""
    corrupt_loads: list[int] = []
    """Indices into the plan's `loaded_blocks` whose host memory had a wrong checksum."""


class WorkerFailed(msgspec.Struct, array_like=True, gc=False, tag=3):
    """The worker failed and exits after this message."""

    message: str
    is_config: bool = False
    """Whether the failure is a ConfigError, caused by a setting."""
    time: float = 0.0
    """Unix time of the failure: the first failure in a group of workers is the cause."""
    is_profile: bool = False
    """Whether the worker ended with a ProfileWritten."""


class WarmupProgress(msgspec.Struct, array_like=True, gc=False, tag=4):
    """Progress of start-up. `stage` is load (in bytes) or warmup (in launches); if `total` is 0,
    `stage` describes the current activity."""

    stage: str
    done: int
    total: int
    left_s: float = 0.0
    """Estimated seconds left; 0 if unknown."""
    bucket: str = ""
    """The bucket that this worker prepares now, for the log; empty if unknown."""


MAX_REFERENCES = 3
"""Maximum block references of a decode per block of the cache. Prompts that share a prefix refer to
the same blocks. vLLM's Gaudi plug-in has the same bound; about 2 references per block were observed
there."""


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """Limits of every launch shape: sizes of the scheduler, the model and the KV cache."""

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_batch: int
    """Maximum number of sequences of a prefill. Without padding, the engine may launch more."""
    num_blocks: int
    prefix_caching: bool
    is_pooling: bool = False
    """Pooling models compute whole texts without a KV cache: no decodes, no context blocks."""
    chunked_prefill: bool = True
    """Whether prompts may be split across steps."""
    merged_prefill: bool = False
    """Whether every prefill has a single row, with up to `max_prefill_batch` concatenated
    sequences."""
    bounds_references: bool = True
    """Whether decodes with more than MAX_REFERENCES block references per block are split. False for
    models with states or windows, whose decodes may refer to the full context of each sequence."""

    @classmethod
    def for_pooling(
        cls, schedule: SchedulerConfig, *, block_size: int, max_model_len: int
    ) -> "BucketLimits":
        """Limits of a pooling model. `block_size` is only the step between query lengths."""
        return cls(
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.token_budget(max_model_len, is_pooling=True),
            max_prefill_batch=schedule.prefill_batch(is_pooling=True),
            # No cache is allocated; some strategies compute decode shapes that are dropped later.
            num_blocks=schedule.max_num_seqs * math.ceil(max_model_len / block_size),
            prefix_caching=False,
            chunked_prefill=False,
            is_pooling=True,
        )

    @property
    def max_query(self) -> int:
        return min(self.max_num_batched_tokens, self.max_model_len)

    @property
    def blocks_per_seq(self) -> int:
        return math.ceil(self.max_model_len / self.block_size)

    @property
    def sequences_per_row(self) -> int:
        """Maximum number of sequences in a row of a prefill."""
        return self.max_prefill_batch if self.merged_prefill else 1

    @property
    def max_context_blocks(self) -> int:
        """Maximum cached blocks before the new tokens of a prompt, from a cached prefix or from
        earlier chunks; 0 without prefix caching and chunked prefill."""
        return self.blocks_per_seq if self.prefix_caching or self.chunked_prefill else 0

    @property
    def max_decode_blocks(self) -> int:
        """Maximum block references of a decode; a shared block counts once per sequence. Decodes
        with more references are split into several launches."""
        full = self.max_num_seqs * self.blocks_per_seq
        if not self.prefix_caching:
            return min(full, self.num_blocks)
        if not self.bounds_references:
            return full
        return min(full, max(MAX_REFERENCES * self.num_blocks, self.blocks_per_seq))


class OffloadFacts(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Capacity and speed of the workers' KV block storage outside the device."""

    num_slots: int
    """Number of blocks in host memory."""
    load_s: float
    """Measured seconds to copy a block to the device."""
    max_files: int
    """Maximum number of blocks in files; 0: no files."""
    file_hashes: bytes
    """32 bytes per block: hashes of blocks whose files all workers have, least recently used
    first."""
    block_bytes: int = 0
    """Bytes of a block on all workers."""


NO_OFFLOAD = OffloadFacts(num_slots=0, load_s=0.0, max_files=0, file_hashes=b"")
"""Facts of workers that do not offload blocks."""

HASH_BYTES = 32
"""Bytes of a block hash (SHA-256)."""


class RankFacts(msgspec.Struct, array_like=True, gc=False):
    """Memory in bytes, and compilations of the warm-up, of a worker of a group after its start."""

    rank: int
    weight_bytes: int
    kv_bytes: int
    graph_bytes: int
    total_bytes: int
    warmup_compilations: int


class WorkerReady(msgspec.Struct, array_like=True, gc=False, tag=5):
    """The worker is ready: facts about its model, memory and buckets."""

    num_blocks: int
    """KV blocks 0 .. num_blocks - 1; the pad block follows them."""
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    buckets: list[Bucket]
    """Buckets that launches may use; empty with exact shapes."""
    device: str
    dtype: str
    weight_bytes: int
    kv_bytes: int
    """Bytes of all KV caches and states, the drafter's caches included."""
    graph_bytes: int
    total_bytes: int
    load_s: float
    warmup_s: float
    bucket_limits: BucketLimits
    """Together with `buckets`, all that the engine needs to rebuild the worker's bucket table."""
    num_deferred: int = 0
    """Number of buckets that are prepared later between steps; WarmedBuckets announces each."""
    driver: str = ""
    software: str = ""
    """Versions of the device's driver and runtime."""
    counters: dict[str, float] = {}
    """Counters as in StepResult, after the warm-up."""
    contiguous: bool = False
    """Whether a decode reads all blocks up to the highest block of its requests."""
    max_tokens_per_step: int = 1
    """Maximum number of tokens that a decode yields per request: 1 + draft tokens."""
    pooling: PoolingFacts | None = None
    """Set for a pooling model, which has no KV blocks and no decodes."""
    prefill_launch_tokens: int = 0
    """Prompt tokens above which a larger prefill launch does not reduce the time per token, so that
    a step need not contain more; 0: a step uses its whole token budget."""
    ranks: list[RankFacts] = []
    """Facts of all workers of a group, by rank; filled in by the executor. Empty for a single
    worker."""
    encoder_cache_tokens: int = 0
    """Maximum rows of image embeddings in the worker's cache; 0: the worker does not accept
    images."""
    whole_images: bool = False
    """VisionFacts.whole_images of the model."""
    prompt_vocab_size: int = 0
    """Number of token ids that are valid in a prompt, if some are never sampled; 0:
    `vocab_size`."""
    request_tiles: int = 0
    """For a model with cross-attention layers: maximum rows of a request's images, which the
    request holds from its first step until it ends. 0: image tokens use the rows, and images are
    held until their last token is computed."""
    offload: OffloadFacts = NO_OFFLOAD
    """KV block storage outside the device; NO_OFFLOAD: not configured."""

    def rank_facts(self, rank: int) -> RankFacts:
        """This worker's facts, as a member of a group."""
        compilations = (
            count
            for name, count in self.counters.items()
            if name.startswith("compilations.") and name.endswith(".warmup")
        )
        return RankFacts(
            rank,
            self.weight_bytes,
            self.kv_bytes,
            self.graph_bytes,
            self.total_bytes,
            int(sum(compilations)),
        )


class WarmedBuckets(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=8):
    """A bucket that a worker prepared on WARM_UP_NEXT, after it was ready."""

    buckets: list[Bucket]
    """The prepared bucket; empty if it does not fit or cannot be compiled, or if the worker had
    none to prepare."""
    num_deferred: int
    """Number of buckets still to prepare."""
    counters: dict[str, float] = {}
    """Counters as in StepResult."""


START_PROFILE, STOP_PROFILE = "start_profile", "stop_profile"
PROFILE_CALLS = (START_PROFILE, STOP_PROFILE)
SLEEP, WAKE_WEIGHTS, WAKE_UP = "sleep", "wake_weights", "wake_up"
WARM_UP_NEXT = "warm_up_next"


class WorkerCall(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=6):
    """A call outside the plans. The answer is a WorkerAnswer, for WARM_UP_NEXT a WarmedBuckets, and
    may overtake the results of plans in flight. A successful WAKE_UP sends progress and a
    WorkerReady before its answer, like a start."""

    name: str
    """A name in PROFILE_CALLS; or, with no plan in flight, SLEEP (free memory), WAKE_WEIGHTS
    (reload the weights), WAKE_UP (reload and rebuild everything) or WARM_UP_NEXT (prepare the next
    remaining bucket, on all workers of a group together)."""
    level: int = 0
    """Level of SLEEP: 1 keeps the weights in host memory if possible, 2 drops them."""


class WorkerAnswer(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=7):
    """A value or an error. `is_refusal`: the caller caused the error, and `code` identifies it."""

    value: str = ""
    error: str | None = None
    is_refusal: bool = False
    code: str | None = None


class LoadAdapter(msgspec.Struct, array_like=True, gc=False, tag=10):
    """Read an adapter to host memory, concurrently with the plans. Answered by an AdapterLoaded."""

    content: str
    """Hash of the adapter's files, by which plans name the adapter."""
    path: str
    root: str
    """See AdapterFolder.root."""
    name: str
    """Name of the adapter in errors: clients may not see its folder."""


class DropAdapter(msgspec.Struct, array_like=True, gc=False, tag=11):
    """Drop an adapter from host memory. The worker sends no answer."""

    content: str


class AdapterLoaded(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=12):
    """An adapter is in host memory; if `error` is set, it could not be read."""

    content: str
    error: str | None = None


class FetchBlocks(msgspec.Struct, array_like=True, gc=False, tag=13):
    """Read blocks from files to host memory, concurrently with the plans. Answered by a
    BlocksFetched. No later plan uses these slots before the answer."""

    hashes: list[bytes]
    slots: list[int]


class DropFiles(msgspec.Struct, array_like=True, gc=False, tag=14):
    """Delete the files of these blocks. The worker sends no answer."""

    hashes: list[bytes]


class BlocksFetched(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=15):
    """The blocks of a FetchBlocks are in host memory, except those listed as missing or corrupt."""

    seconds: float
    missing: list[int] = []
    """Indices into `hashes` of blocks whose file is missing or unreadable."""
    corrupt: list[int] = []
    """Indices into `hashes` of blocks whose file has a wrong checksum or belongs to another
    block."""


ToWorker = (
    StepPlan | GrammarMasks | WorkerCall | LoadAdapter | DropAdapter | FetchBlocks | DropFiles
)
FromWorker = (
    StepResult
    | WorkerFailed
    | WarmupProgress
    | WorkerReady
    | WarmedBuckets
    | WorkerAnswer
    | AdapterLoaded
    | BlocksFetched
)

Handlers = Mapping[type, Callable[[Any], None]]
"""Message handlers by message type."""
