"""Messages between server and engine: tagged structs of plain columns.

Prompts and log-probabilities are binary fields, which decode to views of the received frame instead
of lists of Python numbers.
"""

from typing import Any

import msgspec

from config.errors import bytes_text
from config.lora.info import LoRAInfo
from config.params.pooling import PoolingFacts, PoolingParams
from config.params.sampling import SamplingParams
from hpu.protocol import EncoderInput as EncoderInput
from hpu.protocol import ImagePlacement as ImagePlacement
from hpu.protocol import InputTensor as InputTensor
from hpu.protocol import Logprobs as Logprobs
from hpu.protocol import RankFacts

FRONT_END_SHIFT = 48
"""A key is (front end index << 48) | (engine << 40) | (restart << 32) | serial number."""

ENGINE_SHIFT = 40
"""The engine number takes 8 bits of a key: config/data_parallel.py limits it to 255."""
RESTART_SHIFT = 32
"""A key contains the number of restarts of its front end, modulo 256, so that a restarted front end
does not reuse the keys of its predecessor."""


def engine_of(key: int) -> int:
    """Number of the engine that serves the request with this key."""
    return (key >> ENGINE_SHIFT) & 0xFF


COMPILE_GRAMMAR = "compile_grammar"
"""Control with the arguments `spec`, a GrammarSpec as a list, and `client`, the digest of the API
key or the address, for fair queueing. Fails when the grammar cannot be compiled."""


LOAD_ADAPTER, UNLOAD_ADAPTER = "load_lora_adapter", "unload_lora_adapter"
"""Controls. LOAD_ADAPTER has the arguments `adapter` (a NamedAdapter) and `client` (see
COMPILE_GRAMMAR). UNLOAD_ADAPTER has the argument `lora_name` and returns the number of requests
that still use the adapter."""
REGISTER_ADAPTER = "register_lora_adapter"
"""Control that replaces LOAD_ADAPTER inside the engine, once the adapter's files were checked."""

SLEEP, WAKE_UP = "sleep", "wake_up"
WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""Tags of WAKE_UP: parts of memory to restore."""

AWAKE, FALLING_ASLEEP = "awake", "falling_asleep"
ASLEEP = ("weights_offloaded", "discard_all")
"""States of sleep levels 1 and 2, named after vLLM's metric."""


class Resumption(msgspec.Struct, array_like=True, gc=False):
    """Output of a request that an engine generated before it crashed; another engine continues
    after it."""

    output: memoryview
    """Output tokens; uint32, little-endian."""
    num_prompt_logprobs: int = 0
    """Prompt positions whose log-probabilities the request has received."""
    is_suspect: bool = False
    """Whether an engine crashed after it had scheduled the request and before it sent any output
    for it. The request is isolated: it starts once each running request has output since its own
    start, and no other request starts before this request has output."""


UNSENT = 0
"""Key of a request that has not been sent."""
NO_SAMPLING = SamplingParams()
"""Placeholder for pooling requests, which do not sample."""


class AddRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=1):
    """A sequence to generate, or a text to pool. A request with n choices is sent as n
    sequences."""

    key: int
    """Unique key of the sequence; set by EngineClient.add."""
    prompt: memoryview
    """Prompt tokens; uint32, little-endian."""
    sampling: SamplingParams
    priority: int = 0
    """Smaller values run first under the priority policy."""
    cache_salt: str = ""
    adapter: str = ""
    """Hash of the adapter's files (LoRAInfo.content); empty: no adapter."""
    name: str = ""
    """Name of the request in logs."""
    pooling: PoolingParams | None = None
    """Set for a pooling request, which returns vectors instead of tokens; `sampling` is then
    ignored."""
    is_continuation: bool = False
    """Whether the sequence continues an accepted request (a beam with another token). It is queued
    before new requests of the same priority; ContinuationTurns gives new requests their turns."""
    images: list[ImagePlacement] = []
    """Images whose placeholder tokens are in the prompt."""
    encoded_images: list[EncoderInput] = []
    """Inputs of the vision tower for `images`, one for each distinct content."""
    resumption: Resumption | None = None
    """Set if an engine that crashed had accepted the request. Such a request is exempt from the
    limit on waiting requests."""
    timeout_s: float = 0.0
    """Seconds after its arrival at which the request is failed; 0: no limit. Set by
    EngineClient.add."""
    tenant: int = 0
    """Number of the API key, for fair shares; 0 without an API key or without --fair-share. Set by
    EngineClient.add."""
    group: int = 0
    """Key of the first text of the same pooling request; 0: this text is the first."""


class Abort(msgspec.Struct, array_like=True, gc=False, tag=2):
    """Abort these requests; unknown keys are ignored. No Finish is sent for them."""

    keys: list[int]


class Control(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=3):
    """A call that is answered with a Reply, unless it is cancelled (CancelControl). Names:
    reset_prefix_cache, ping, start_profile and stop_profile (the value is the path of the trace
    file), shapes (launch shapes, see StepStats.shapes), sleep_state, SLEEP and WAKE_UP (see
    engine/core/engine_core.py), COMPILE_GRAMMAR, LOAD_ADAPTER, UNLOAD_ADAPTER and, inside the
    engine, REGISTER_ADAPTER."""

    call: int
    name: str
    arguments: dict[str, Any] = {}


class CancelControl(msgspec.Struct, array_like=True, gc=False, tag=4):
    """Cancel a COMPILE_GRAMMAR, or a LOAD_ADAPTER whose adapter is not being read yet, because its
    caller no longer waits. No Reply follows. Other controls and unknown calls are not affected."""

    call: int


ToEngine = AddRequest | Abort | Control | CancelControl


SLEEPING = "the engine sleeps"
"""`Finish.error` of requests that an engine ends or rejects because it sleeps or falls asleep."""


class Finish(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Last message for a key. Times are seconds in the queue, in prefill and in decode."""

    key: int
    reason: str
    """stop, length, abort or error."""
    stop_token: int | None = None
    """The stop_token_ids entry that ended the sequence; None if something else, or an EOS token
    that is not ignored, ended it."""
    error: str | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_preemptions: int = 0
    param: str | None = None
    """Request parameter that `error` is about, if the request caused the error; empty for the
    request as a whole, None for other errors."""
    is_retryable: bool = False
    """Whether a retry may succeed later, for example because the engine is asleep."""
    is_timeout: bool = False
    """Whether AddRequest.timeout_s has passed; `error` describes how far the request got."""


class EngineStats(msgspec.Struct, omit_defaults=True, gc=False):
    """Gauges of an engine, and counters since its start. Sent with each step, and on changes."""

    running: int = 0
    waiting: int = 0
    waiting_prompt_tokens: int = 0
    oldest_waiting_s: float = 0.0
    """Time since the arrival of the request that entered the queue first; 0 if no request waits."""
    blocks_used: int = 0
    blocks_total: int = 0
    sleep: str = AWAKE
    """AWAKE, FALLING_ASLEEP (new requests are rejected, open requests may finish) or an entry of
    ASLEEP."""
    preemptions: int = 0
    prefill_tokens_per_s: float = 0.0
    """Prefill rate (see PrefillRate); 0 without --max-ttft, and before the first measurement."""
    prefilling_tokens: int = 0
    """Prompt tokens of running requests that are not computed yet; 0 without --max-ttft."""
    waiting_shares: list[tuple[int, int, int]] = []
    """(priority, tenant, tokens) of waiting requests; empty without --max-ttft."""
    waiting_tenants: int = 0
    """Number of tenants with waiting requests; 0 without fair shares."""
    tenant_tokens: dict[str, int] = {}
    """Tokens served by tenant label (see `tenant_label`); empty without fair shares. Uncached
    prompt tokens are counted when a request starts, output tokens when it ends."""
    steps: int = 0
    lookups: dict[str, int] = {}
    """Bucket lookups by phase and result, such as `prefill.hit`; `refused` counts rejected
    sequences."""
    useful_tokens: dict[str, int] = {}
    """Useful tokens by phase."""
    padding_tokens: dict[str, int] = {}
    compilations: dict[str, int] = {}
    """Compilations by phase and period, such as `decode.serving`."""
    compile_seconds: dict[str, float] = {}
    """Total compilation time by period: 'warmup', 'serving'."""
    recompilations: int = 0
    """Recompilations after warm-up, counted by the device's runtime; 0 if the runtime does not
    count them."""
    cpu_fallbacks: int = 0
    """Device operations that fell back to the host after warm-up."""
    recipes: dict[str, int] = {}
    """Lookups in the runtime's cache of compiled recipes, by result: 'hit', 'miss'."""
    graphs: int = 0
    graph_bytes: int = 0
    max_loras: int = 0
    """Maximum number of adapters in a batch; 0: LoRA is off."""
    lora_running: dict[str, int] = {}
    """Running requests by adapter, without zeros."""
    lora_waiting: dict[str, int] = {}
    lora_loads: int = 0
    """Adapters read to host memory."""
    lora_load_failures: int = 0
    lora_evictions: int = 0
    """Adapters dropped from host memory."""
    lora_bytes: int = 0
    """Size of the adapters in host memory."""
    encoder_cache_tokens: int = 0
    """Rows of image embeddings in the workers' encoder cache."""
    encoder_cache_queries: int = 0
    """Images of scheduled chunks that were looked up in the encoder cache."""
    encoder_cache_hits: int = 0
    encoded_images: int = 0
    encoded_image_tokens: int = 0
    """Rows of embeddings that the vision tower was scheduled to compute."""
    spec_decode: dict[str, int] = {}
    """'num_drafts' (per request and step), 'num_draft_tokens', 'num_accepted_tokens', and
    'accepted.0', ...: accepted drafts by position. Empty without speculation."""
    kv_offload: dict[str, int] = {}
    """KVOffload.gauges: offloaded blocks; empty without offloading."""
    step_tokens: list[int] = []
    """Tokens of each step that produced tokens since the last stats were sent
    (OutputProcessor.num_step_tokens)."""
    step_seconds: list[tuple[int, float]] = []
    """(phase, seconds) of each launch since the last stats were sent."""


class StepOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=4):
    """Output of a step for a single front end, in columns."""

    step: int
    started: list[int] = []
    """Keys scheduled for the first time."""
    started_cached: list[int] = []
    """Prompt tokens of each started key found in the prefix cache."""
    keys: list[int] = []
    counts: list[int] = []
    """Number of tokens of each key in `tokens`; empty when each key has a single token."""
    tokens: list[int] = []
    logprobs: list[tuple[int, Logprobs]] = []
    """(key, positions), in the order of the key's tokens."""
    prompt_logprobs: list[tuple[int, Logprobs]] = []
    """(key, positions) for prompt tokens from index 1: an entry for each chunk of the prompt that
    has unsent positions; sent with the key's first token at the latest."""
    vectors: list[tuple[int, int, memoryview]] = []
    """(key, number of vectors, their values as little-endian float32): result of a pooling request,
    sent in the same message as its Finish."""
    finished: list[Finish] = []
    stats: EngineStats | None = None


class Reply(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=5):
    """Answer to a Control: a value, or an error."""

    call: int
    value: Any = None
    error: str | None = None
    is_refusal: bool = False
    """Whether the error is a UserError."""
    code: str | None = None
    """The UserError's code, which clients may match on."""
    is_overload: bool = False
    """Whether the error is Overloaded: a retry may succeed later."""


class Hello(msgspec.Struct, array_like=True, gc=False, tag=6):
    """First message on the socket on which an engine receives."""

    engine: int
    pid: int


LOAD = "load"
"""Progress stage of weight loading; counts bytes."""
BACKGROUND_WARMUP = "later"
"""Progress stage after Ready: buckets that are warmed up while the engine is idle."""
_STAGE_TEXTS = {LOAD: "loading the weights", "warmup": "warming up"}
"""Progress stage -> its words in logs and errors."""


class Progress(msgspec.Struct, array_like=True, gc=False, tag=7):
    """Progress of the start-up, of a wake-up or of the warm-up after Ready."""

    engine: int
    stage: str
    done: int
    total: int
    left_s: float = 0.0
    """Expected remaining seconds; 0 if unknown."""

    @property
    def counts(self) -> str:
        """Progress such as `12 of 97`; for weights, which are counted in bytes, `1.25 GiB of 16.06
        GiB`."""
        if self.stage == LOAD:
            return f"{bytes_text(self.done)} of {bytes_text(self.total)}"
        return f"{self.done} of {self.total}"

    @property
    def text(self) -> str:
        """Progress such as `warming up, 12 of 97`; only the stage if it has no counts."""
        stage = _STAGE_TEXTS.get(self.stage, self.stage)
        return f"{stage}, {self.counts}" if self.total else stage


class Ready(msgspec.Struct, array_like=True, gc=False, tag=8):
    """The engine accepts requests; its report at the end of the start-up."""

    engine: int
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_buckets: int
    device: str
    dtype: str
    weight_bytes: int
    kv_bytes: int
    total_bytes: int
    load_s: float
    warmup_s: float
    driver: str = ""
    software: str = ""
    """Versions of the device's driver and runtime."""
    logprobs_mode: str = "raw_logprobs"
    """Kind of the returned log-probabilities: a value of config.engine.LOGPROBS_MODES."""
    pooling: PoolingFacts | None = None
    """Set for a pooling model, which returns vectors instead of tokens."""
    ranks: list[RankFacts] = []
    """Facts of each worker, by rank; empty for a single worker."""
    request_tiles: int = 0
    prompt_vocab_size: int = 0
    """`request_tiles` and `prompt_vocab_size`: see WorkerReady."""
    ready_unix_s: float = 0.0
    """Time at which the engine became ready, in seconds since 1970."""


class Failed(msgspec.Struct, array_like=True, gc=False, tag=9):
    """The engine has ended. Each open request fails or is resumed."""

    engine: int
    message: str
    is_config: bool = False
    """Whether the failure is a ConfigError that is not a CheckpointError."""
    may_follow: bool = False
    """Whether the failure may be a consequence of another engine's end; read where engines share
    experts."""
    is_stopped: bool = False
    """Whether the engine was told to stop."""
    is_external: bool = False
    """Whether the cause lies outside of the engine's computation."""
    is_profile: bool = False
    """Whether the engine has ended with a ProfileWritten."""


class PromptBlocks(msgspec.Struct, array_like=True, gc=False, tag=10):
    """Block hashes of the first full blocks (at most MAX_ANNOUNCED_BLOCKS) of a prompt that another
    front end sent to the engine, so that every router can estimate the engine's prefix cache."""

    hashes: list[bytes]


class Adapters(msgspec.Struct, array_like=True, gc=False, tag=11):
    """All adapters that the engine serves; with LoRA sent at the start and on each change, and
    always to a front end that connects later."""

    infos: list[LoRAInfo]


FromEngine = Adapters | StepOutput | Reply | Hello | Progress | Ready | Failed | PromptBlocks
