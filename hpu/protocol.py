"""What an engine and its workers say to each other. Columns of plain values; knows no tensors.

A worker keeps each live sequence in a row, so a plan carries only what changed. Everything in a
plan applies in this order: freed rows, moved blocks, new rows, grown blocks, launches one after the
other.
"""

import msgspec

from config.params.pooling import PoolingFacts
from hpu.bucketing.limits import BucketLimits

PREFILL = 0
DECODE = 1


NO_MASKS = memoryview(b"")
TOKENS_PER_WORD = 32


class RequestSampling(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What the sampler must know of one row. The engine draws the seed that a caller left out."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    """Tokens barred while fewer than `min_tokens` were generated (end tokens, stop_token_ids)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_logprobs: int = -1
    """-1: none; k: the chosen token and the k most likely."""
    num_prompt_logprobs: int = -1
    masked: bool = False
    """Whether every plan that samples the row brings the tokens that may come next."""


class NewRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A sequence that enters `row`, afresh or after a preemption."""

    req_index: int
    tokens: memoryview
    """uint32, little-endian: the prompt, and after a preemption what was generated since."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose keys and values already lie in `blocks` (a prefix hit)."""
    blocks: list[int]
    sampling: RequestSampling


class Text(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What a pooling model reads at once, and what is wanted of it."""

    tokens: memoryview
    """uint32, little-endian."""
    by_token: bool = False
    """Whether a vector for each token is wanted, rather than one for all."""
    normalizes: bool = False
    """Vectors of length 1; of a model with a head, numbers between 0 and 1."""
    dimensions: int = 0
    """Numbers of each vector that are wanted, cut before it is normalised; 0: all."""
    num_first: int = 0
    """Tokens of type 0; those behind have type 1. 0: all have type 0."""
    num_skipped: int = 0
    """Tokens at the front that are read and not pooled."""


class Launch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One forward pass in one bucket. Requests keep their order; a result's tokens follow it.

    A prefill row takes `counts[i]` further tokens of its known ones and samples when none is left
    (`samples[i]`). A decode row takes the one token it sampled last, and always samples: its
    `counts` and `samples` stay empty. Of a pooling model every launch is a prefill, and `rows` are
    places among the plan's `texts`; nothing samples.
    """

    phase: int
    bucket: tuple[int, int, int]
    """(batch, query, blocks): for a prefill, blocks of cached context a row; for a decode, query is
    1 and blocks is the total over all rows, or, where the worker reads its cache as one slice, one
    more than the highest block of any row."""
    req_indices: list[int]
    query_lens: list[int] = []
    samples: list[bool] = []


class StepPlan(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=1):
    """One step. Gets exactly one StepResult, in order."""

    step: int
    launches: list[Launch]
    new_requests: list[NewRequest] = []
    grown_requests: list[int] = []
    grown_blocks: list[int] = []
    """grown_requests[i] is lent block grown_blocks[i], at the end of its table."""
    freed_requests: list[int] = []
    moved_from: list[int] = []
    moved_to: list[int] = []
    """Block moved_from[i] lies at moved_to[i] from now on, for whichever row names it. All move at
    once, and no row names a block of moved_to before."""
    masked_requests: list[int] = []
    """The masked rows that sample in this plan, and whose last token was known when it was made."""
    masks: memoryview = NO_MASKS
    """One bit a token, set where it may come next: int32 little-endian, (masked_requests,
    words)."""
    deferred_requests: list[int] = []
    """The other masked rows that sample in it. A launch with one of them runs forward at once and
    samples when `GrammarMasks` has come: behind this plan, before the next one."""
    texts: list[Text] = []
    """For a pooling model, and nothing else is: what the launches read, whole."""


class GrammarMasks(msgspec.Struct, array_like=True, gc=False, tag=9):
    """Behind a plan with late rows, once the result of the plan before is known: exactly one.

    A late row that is not named has ended meanwhile, and what it samples is thrown away.
    """

    step: int
    """The plan's."""
    req_indices: list[int]
    masks: memoryview
    """As in StepPlan: (rows, words)."""


class Logprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities for `len(ranks)/4` positions, chosen token first, then the `k` most likely.

    `ids` is int32 and `values` float32, both (positions, k + 1) and little-endian; `ranks` is int32
    (positions,): 1 for the most likely token. Values are log-softmax of the raw logits.
    """

    k: int
    ids: memoryview
    values: memoryview
    ranks: memoryview


class StepResult(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=2):
    """What a step produced, in the plan's order.

    `tokens` holds the tokens of each sampling request, `token_counts[i]` for the i-th; -1 marks
    logits that were not finite.
    """

    step: int
    tokens: list[int]
    logprobs: list[tuple[int, Logprobs]] = []
    """(index into tokens, one position) for the rows that asked."""
    prompt_logprobs: list[tuple[int, Logprobs]] = []
    """(row, positions of this chunk) for the rows that asked: the log-probability of each prompt
    token that follows a position of the chunk."""
    seconds: list[float] = []
    """One a launch, on the device, sampling included."""
    host_s: float = 0.0
    counters: dict[str, float] = {}
    """Changed counters of the worker (see engine/core/stats.py)."""
    vectors: list[tuple[int, memoryview]] = []
    """Of a pooling model, in the order of the launches' texts: (rows, float32 little-endian); a
    number of rows of -1 says that its vectors were not numbers."""
    token_counts: list[int] = []
    """Tokens of each sampling request, in the order of `tokens`; empty when each has exactly one.
    Last, so that an empty column takes no byte on the wire."""


class WorkerFailed(msgspec.Struct, array_like=True, gc=False, tag=3):
    """The worker cannot go on; it exits after this."""

    message: str
    is_config: bool = False
    """A setting is to blame: a ConfigError."""


class WarmupProgress(msgspec.Struct, array_like=True, gc=False, tag=4):
    """Where start-up stands: `stage` is load, warmup."""

    stage: str
    done: int
    total: int
    left_s: float = 0.0
    """Expected; 0 where nobody knows."""


class WorkerReady(msgspec.Struct, array_like=True, gc=False, tag=5):
    """What the worker found out while it started."""

    num_blocks: int
    """Blocks an engine may lend: 0 .. num_blocks - 1. The pad block lies beyond them."""
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    buckets: list[tuple[int, int, int, int]]
    """(phase, batch, query, blocks) prepared; empty when the table is exact."""
    device: str
    dtype: str
    weight_bytes: int
    kv_bytes: int
    graph_bytes: int
    total_bytes: int
    load_s: float
    warmup_s: float
    bucket_limits: BucketLimits
    """With `buckets`, all that the engine needs to rebuild the worker's bucket table."""
    num_later: int = 0
    """Buckets that are prepared between steps; each time a `Warmed` says so."""
    driver: str = ""
    software: str = ""
    """Versions of the device's driver and runtime."""
    counters: dict[str, float] = {}
    """As in StepResult: what warm-up counted."""
    contiguous: bool = False
    """Whether a decode's blocks are all blocks up to the highest of its rows."""
    max_tokens_per_step: int = 1
    """The most tokens that a StepResult brings for one request: 1 + draft tokens."""
    pooling: PoolingFacts | None = None
    """Set when the model gives vectors: there are no blocks then, and no decodes."""


class Warmed(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=8):
    """What an idle worker prepared after it was ready."""

    buckets: list[tuple[int, int, int, int]]
    """As in WorkerReady; empty when a bucket could not be prepared."""
    num_later: int
    """Buckets still to come."""
    counters: dict[str, float] = {}
    """As in StepResult."""


START_PROFILE, STOP_PROFILE = "start_profile", "stop_profile"
PROFILE_CALLS = (START_PROFILE, STOP_PROFILE)
SLEEP, WAKE_WEIGHTS, WAKE_UP = "sleep", "wake_weights", "wake_up"


class WorkerCall(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=6):
    """Something asked beside the plans. Gets one WorkerAnswer, which may overtake the results of
    plans in flight; only WAKE_UP that succeeds gets a WorkerReady, as a start does, with progress
    before it."""

    name: str
    """One of PROFILE_CALLS, or with no plan in flight SLEEP (give back memory), WAKE_WEIGHTS (have
    the weights on the device again) or WAKE_UP (be as before)."""
    level: int = 0
    """Of SLEEP: 1 keeps the weights in host memory, 2 drops them."""


class WorkerAnswer(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=7):
    """A value, or an error: the caller's own when `is_refusal`, with a word to match on."""

    value: str = ""
    error: str | None = None
    is_refusal: bool = False
    code: str | None = None


ToWorker = StepPlan | GrammarMasks | WorkerCall
FromWorker = StepResult | WorkerFailed | WarmupProgress | WorkerReady | Warmed | WorkerAnswer
