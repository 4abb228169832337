"""Messages between an engine and its workers: columns of plain values, no tensors.

A worker keeps the state of each live request at its `req_index`, so a plan carries only changes.
They apply in this order: freed requests, stored blocks, loaded blocks, moved blocks, new requests,
known tokens, bitmasks, grown blocks, launches one after the other.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from config.engine import SchedulerConfig
from config.params.pooling import PoolingFacts
from config.params.token_ids import TokenIds

PREFILL = 0
DECODE = 1

Shape = tuple[int, int, int]
"""(batch, query, blocks)"""

Bucket = tuple[int, int, int, int]
"""(phase, batch, query, blocks)"""

NO_MASKS = memoryview(b"")
NO_SLOT = -1
"""Of a request without an adapter."""
TOKENS_PER_WORD = 32
"""Of a bitmask."""
TOKEN_BYTES = 4
"""Of tokens in a message: uint32, little-endian."""


class Ranks(NamedTuple):
    """This process among those that run one engine's model, and the engine among those that share
    experts."""

    world_size: int = 1
    """Of the engine."""
    rank: int = 0
    """In the engine."""
    init_method: str = ""
    """Rendezvous, as torch.distributed spells it: tcp://host:port or file://path."""
    timeout_s: float = 1800.0
    """How long a rank waits for the others, at the start and in each collective."""
    local_rank: int | None = None
    """The index of its device among those of this host; None: `rank`."""
    engine: int = 0
    num_engines: int = 1
    """Engines that step together, since their experts are distributed over the ranks of all."""

    @property
    def global_size(self) -> int:
        """Ranks of all engines, which meet."""
        return self.world_size * self.num_engines

    @property
    def global_rank(self) -> int:
        """Among `global_size`; the ranks of an engine are adjacent."""
        return self.engine * self.world_size + self.rank

    @property
    def device_index(self) -> int:
        """`local_rank`, which is `rank` on a single host."""
        return self.rank if self.local_rank is None else self.local_rank


SINGLE_RANK = Ranks()
"""A process that runs alone."""


class RequestSampling(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Sampling parameters of one request. The engine draws the seed if the caller gave none."""

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
    """-1: none; k: of the sampled token and of the k most likely."""
    num_prompt_logprobs: int = -1
    masked: bool = False
    """Whether every plan that samples the request brings a grammar bitmask for it."""


class InputTensor(msgspec.Struct, array_like=True, gc=False):
    """One tensor that the vision tower reads."""

    name: str
    """The tower's argument: pixel_values, image_sizes, image_grid_thw."""
    dtype: str
    """As torch names it: float32, int64."""
    shape: tuple[int, ...]
    data: memoryview
    """Row by row, little-endian."""


class ImagePlacement(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Where a request has an image. Those of a request are in the order of their offsets."""

    content: bytes
    """Hash of all that its embeddings depend on; equal images are encoded once."""
    offset: int
    """Its first token in the prompt."""
    length: int
    """Tokens from there to its last one. Those with the model's image token take the rows of its
    embeddings, one after the other; the others are text, as the ends of rows are."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """Time, height and width in tokens; for positions with three axes only."""
    time_step: float = 1.0
    """Positions from one time of the grid to the next, of which the sums are rounded down."""


class EncodedImage(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """An image for the vision tower."""

    content: bytes
    num_embeddings: int
    """Rows that the tower makes of it: one for each token, or for layers that read images one for
    each tile."""
    tensors: list[InputTensor]


class NewRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request that starts at `req_index`, new or after a preemption."""

    req_index: int
    tokens: memoryview
    """uint32, little-endian: the prompt, and after a preemption the generated tokens."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose keys and values are already in `blocks` (a prefix hit)."""
    blocks: list[int]
    sampling: RequestSampling
    lora_slot: int = NO_SLOT
    """Of its adapter."""
    images: list[ImagePlacement] = []


class Text(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One input of a pooling model, and which vectors it gets."""

    tokens: memoryview
    """uint32, little-endian."""
    by_token: bool = False
    """A vector for each token instead of one for all."""
    normalizes: bool = False
    """Vectors of length 1; for a model with a head, numbers between 0 and 1."""
    dimensions: int = 0
    """Dimensions of each vector, cut before it is normalised; 0: all."""
    num_first: int = 0
    """Tokens of type 0; the following ones have type 1. 0: all have type 0."""
    num_skipped: int = 0
    """Tokens at the front that are not pooled."""
    lora_slot: int = NO_SLOT
    """Of its adapter."""


class Launch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One forward pass in one bucket. Results are in the order of `req_indices`.

    A request of a prefill computes its next `query_lens[i]` tokens, and samples if these are its
    last (`samples[i]`). A request of a decode computes the token that it sampled last, and always
    samples: `query_lens` and `samples` are empty. For a pooling model every launch is a prefill,
    `req_indices` are indices into the plan's `texts`, and nothing samples.

    A launch without requests computes padding only, for the experts of other engines.
    """

    phase: int
    bucket: Shape
    """(batch, query, blocks). Prefill: blocks of cached context a request; with merged prefill
    batch is 1, and query and blocks are those of all requests together. Decode: query is 1, and
    blocks is the total over all requests, or, where the worker reads its cache as one slice, the
    highest block of any request plus 1."""
    req_indices: list[int]
    query_lens: list[int] = []
    samples: list[bool] = []


class KnownTokens(msgspec.Struct, array_like=True, gc=False):
    """Of each request of a plan's decodes, in their order: what the stages before the last one of a
    pipeline have not seen."""

    num_tokens: list[int]
    """All of its tokens, of which the last one is not computed."""
    last_tokens: memoryview
    """(requests, tokens of a step at most) uint32, little-endian: the last ones; 0 in front of the
    first one."""
    drafts: list[list[int]]
    """What the decode verifies, where the host knows all tokens (StepResult.drafts)."""


class StepPlan(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=1):
    """One step. Each plan gets exactly one StepResult, in order."""

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
    move at once; no block table has a block of moved_to before."""
    masked_requests: list[int] = []
    """Requests with a grammar that sample in this plan, and whose last token is known."""
    masks: memoryview = NO_MASKS
    """(masked_requests, words) int32 little-endian: one bit a token, set if it may come next. With
    `mask_counts`, (sum of these, words)."""
    deferred_requests: list[int] = []
    """The other requests with a grammar that sample in this plan. A launch with one of them runs
    its forward pass at once and samples when `GrammarMasks` comes, before the next plan."""
    texts: list[Text] = []
    """For a pooling model: whole inputs of the launches; requests and blocks are empty then."""
    lora_slots: list[int] = []
    lora_adapters: list[str] = []
    """The adapter lora_adapters[i], which the worker has read, is copied to slot lora_slots[i]
    before the launches. No request of another adapter has that slot."""
    mask_counts: list[int] = []
    """Bitmasks of each of `masked_requests`: of its next token, and of those behind its first
    drafts (StepResult.drafts). Empty: one each."""
    freed_images: list[bytes] = []
    """Contents whose embeddings are dropped, before others are encoded."""
    encoded_images: list[EncodedImage] = []
    """Images to encode before the launches. Their embeddings stay until they are freed: a launch
    has only tokens of images that were encoded before and not freed."""
    known: KnownTokens | None = None
    """With speculation between pipeline stages."""
    stored_blocks: list[int] = []
    stored_slots: list[int] = []
    """Block stored_blocks[i] is copied to slot stored_slots[i] of the host's memory, before
    anything of this plan writes to it."""
    stored_hashes: list[bytes] = []
    """Of `stored_blocks`, where there are files: by these names they are written."""
    loaded_slots: list[int] = []
    loaded_blocks: list[int] = []
    """Slot loaded_slots[i] is copied to block loaded_blocks[i], after what is stored and before the
    launches."""


class GrammarMasks(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=9):
    """Exactly one after each plan with deferred requests, once the result before it is known.

    A deferred request that is not named has finished, and its sample is dropped.
    """

    step: int
    """The plan's."""
    req_indices: list[int]
    masks: memoryview
    """(req_indices, words), as in StepPlan."""
    mask_counts: list[int] = []
    """As in StepPlan."""


class Logprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of `len(ranks) / 4` positions: the sampled token, then the `k` most likely.

    `ids` is int32 and `values` float32, both (positions, k + 1) and little-endian; `ranks` is int32
    (positions,): 1 for the most likely token. Values are log-softmax of the raw logits.
    """

    k: int
    ids: memoryview
    values: memoryview
    ranks: memoryview


class StepResult(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=2):
    """The results of a step, in the plan's order.

    `tokens` holds the tokens of each sampling request, `token_counts[i]` for the i-th; -1 marks
    logits that were not finite.
    """

    step: int
    tokens: list[int]
    logprobs: list[tuple[int, Logprobs]] = []
    """(index into tokens, one position) of requests with logprobs."""
    prompt_logprobs: list[tuple[int, Logprobs]] = []
    """(req_index, positions of this chunk) of requests with prompt logprobs: of each prompt token
    that follows a position of the chunk."""
    seconds: list[float] = []
    """Device time of each launch, sampling included."""
    host_s: float = 0.0
    counters: dict[str, float] = {}
    """The worker's counters that changed (see engine/stats.py)."""
    vectors: list[tuple[int, memoryview]] = []
    """Of a pooling model, in the order of the launches' texts: (number of vectors, float32
    little-endian); -1 vectors if they were not finite."""
    token_counts: list[int] = []
    """Tokens of each sampling request, in the order of `tokens`; empty when each has exactly one.
    At the end, so that an empty column takes no byte on the wire."""
    drafts: list[tuple[int, list[int]]] = []
    """(index of a sampling request, tokens): what its next decode may verify. Of requests with a
    grammar, so that the engine sends bitmasks for it; with pipeline stages of all, which get it
    with the plan of that decode."""
    corrupt_loads: list[int] = []
    """Indices into the plan's `loaded_blocks`: what was in host memory had a wrong checksum."""


class WorkerFailed(msgspec.Struct, array_like=True, gc=False, tag=3):
    """The worker failed and exits after this."""

    message: str
    is_config: bool = False
    """Caused by a setting: a ConfigError."""
    time: float = 0.0
    """Unix time of the failure: of a group of workers the first one is the cause."""


class WarmupProgress(msgspec.Struct, array_like=True, gc=False, tag=4):
    """Progress of start-up; `stage` is load, in bytes, or warmup, in launches, or with a `total` of
    0 what is under way."""

    stage: str
    done: int
    total: int
    left_s: float = 0.0
    """Estimate; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """The sizes of scheduler, model and KV cache that limit every shape."""

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_batch: int
    num_blocks: int
    prefix_caching: bool
    is_pooling: bool = False
    """Pooling models compute whole texts without a KV cache: no decodes, no context blocks."""
    merged_prefill: bool = False
    """Every prefill has one row, with up to `max_prefill_batch` sequences behind each other."""

    @classmethod
    def for_pooling(
        cls, schedule: SchedulerConfig, *, block_size: int, max_model_len: int
    ) -> "BucketLimits":
        """Limits of a pooling model; `block_size` is only the step between query lengths."""
        return cls(
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.token_budget(max_model_len),
            max_prefill_batch=schedule.prefill_batch(is_pooling=True),
            # No cache is allocated; some strategies compute decode shapes that are then dropped.
            num_blocks=schedule.max_num_seqs * math.ceil(max_model_len / block_size),
            prefix_caching=False,
            is_pooling=True,
        )

    @property
    def max_query(self) -> int:
        """New tokens of one sequence in one launch."""
        return min(self.max_num_batched_tokens, self.max_model_len)

    @property
    def blocks_per_seq(self) -> int:
        """Blocks of a full context."""
        return math.ceil(self.max_model_len / self.block_size)

    @property
    def max_decode_blocks(self) -> int:
        """Block references of one decode; a shared block counts once for each sequence."""
        full = self.max_num_seqs * self.blocks_per_seq
        return full if self.prefix_caching else min(full, self.num_blocks)


class OffloadFacts(msgspec.Struct, array_like=True, gc=False):
    """What the workers have for KV blocks outside the device."""

    num_slots: int
    """Blocks in host memory."""
    load_s: float
    """Measured time of a copy of one block to the device."""
    max_files: int
    """Blocks in files; 0: there are none."""
    file_hashes: bytes
    """32 bytes each: blocks whose files all workers have, the one that was not used for longest
    first."""
    block_bytes: int = 0
    """Of one block on all workers."""


HASH_BYTES = 32
"""Of a block's hash, SHA-256."""


class RankFacts(msgspec.Struct, array_like=True, gc=False):
    """What one worker of a group has after its start; memory in bytes."""

    rank: int
    weight_bytes: int
    kv_bytes: int
    graph_bytes: int
    total_bytes: int
    warmup_compilations: int


class WorkerReady(msgspec.Struct, array_like=True, gc=False, tag=5):
    """The worker is ready: facts of its model, memory and buckets."""

    num_blocks: int
    """KV blocks 0 .. num_blocks - 1; the pad block comes after them."""
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    buckets: list[Bucket]
    """Those prepared; empty when the table is exact."""
    device: str
    dtype: str
    weight_bytes: int
    kv_bytes: int
    """Of the KV cache, and of states."""
    graph_bytes: int
    total_bytes: int
    load_s: float
    warmup_s: float
    bucket_limits: BucketLimits
    """With `buckets`, all that the engine needs to rebuild the worker's bucket table."""
    num_later: int = 0
    """Buckets that are prepared between steps, each announced by a `Warmed`."""
    driver: str = ""
    software: str = ""
    """Versions of the device's driver and runtime."""
    counters: dict[str, float] = {}
    """As in StepResult, after the warm-up."""
    contiguous: bool = False
    """Whether a decode reads all blocks up to the highest one of its requests."""
    max_tokens_per_step: int = 1
    """Maximum number of tokens of one request in a StepResult: 1 + draft tokens."""
    pooling: PoolingFacts | None = None
    """Set for a pooling model: it has no KV blocks and no decodes."""
    prefill_launch_tokens: int = 0
    """Prompt tokens from which on a larger prefill launch takes no less time per token, so that a
    step need not wait for more; 0: a step takes as many as its budget allows."""
    ranks: list[RankFacts] = []
    """Of all workers of a group, by rank; the executor fills it in. Empty of one worker."""
    encoder_cache_tokens: int = 0
    """Rows of image embeddings that the worker keeps at most; 0: it takes no images."""
    whole_images: bool = False
    """VisionFacts.whole_images of the model."""
    prompt_vocab_size: int = 0
    """Token ids that a prompt may have, where some are never sampled; 0: `vocab_size`."""
    request_tiles: int = 0
    """Of a model whose layers read images: rows that a request's images have at most, which it
    holds from its first step on until it ends. 0: tokens take the rows, and images are held until
    their last token is computed."""
    offload: OffloadFacts | None = None
    """None: no KV blocks are kept outside the device."""

    def rank_facts(self, rank: int) -> RankFacts:
        """What this worker reports, as a part of a group."""
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


class Warmed(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=8):
    """A bucket that an idle worker prepared after it was ready. A worker of a group waits for
    WARM_UP_NEXT, since all of them must run the same launches in the same order."""

    buckets: list[Bucket]
    """As in WorkerReady; empty when a bucket could not be prepared."""
    num_later: int
    """Buckets still to come."""
    counters: dict[str, float] = {}
    """As in StepResult."""


START_PROFILE, STOP_PROFILE = "start_profile", "stop_profile"
PROFILE_CALLS = (START_PROFILE, STOP_PROFILE)
SLEEP, WAKE_WEIGHTS, WAKE_UP = "sleep", "wake_weights", "wake_up"
WARM_UP_NEXT = "warm_up_next"


class WorkerCall(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=6):
    """A call beside the plans. Gets one WorkerAnswer, which may overtake the results of plans in
    flight; but a successful WAKE_UP gets progress and a WorkerReady, as a start does, and
    WARM_UP_NEXT a Warmed."""

    name: str
    """One of PROFILE_CALLS; or, with no plan in flight, SLEEP (free memory), WAKE_WEIGHTS (load the
    weights again), WAKE_UP (load and build everything again) or WARM_UP_NEXT (prepare one of the
    remaining buckets, on all workers of a group at once)."""
    level: int = 0
    """For SLEEP: 1 keeps the weights in host memory, 2 drops them."""


class WorkerAnswer(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=7):
    """A value or an error; `is_refusal` if the caller caused it, with a `code` to match on."""

    value: str = ""
    error: str | None = None
    is_refusal: bool = False
    code: str | None = None


class LoadAdapter(msgspec.Struct, array_like=True, gc=False, tag=10):
    """Read an adapter to host memory, beside the plans. Gets one AdapterLoaded."""

    content: str
    """Hash of its files, by which plans name it."""
    path: str
    root: str
    """As AdapterFolder.root."""
    name: str
    """What errors call it: clients may not see its folder."""


class DropAdapter(msgspec.Struct, array_like=True, gc=False, tag=11):
    """Forget an adapter in host memory. Gets no answer."""

    content: str


class AdapterLoaded(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=12):
    """An adapter is in host memory, or why it cannot be."""

    content: str
    error: str | None = None


class FetchBlocks(msgspec.Struct, array_like=True, gc=False, tag=13):
    """Read blocks from files to host memory, beside the plans. Gets one BlocksFetched. No plan
    names these slots until then."""

    hashes: list[bytes]
    slots: list[int]


class DropFiles(msgspec.Struct, array_like=True, gc=False, tag=14):
    """Delete the files of these blocks. Gets no answer."""

    hashes: list[bytes]


class BlocksFetched(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=15):
    """The blocks of a FetchBlocks are in host memory, but for those that failed."""

    seconds: float
    missing: list[int] = []
    """Indices into `hashes`: there is no such file, or it cannot be read."""
    corrupt: list[int] = []
    """Those whose file has a wrong checksum, or is that of another block."""


ToWorker = (
    StepPlan | GrammarMasks | WorkerCall | LoadAdapter | DropAdapter | FetchBlocks | DropFiles
)
FromWorker = (
    StepResult
    | WorkerFailed
    | WarmupProgress
    | WorkerReady
    | Warmed
    | WorkerAnswer
    | AdapterLoaded
    | BlocksFetched
)
