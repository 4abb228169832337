"""Messages between server and engine: tagged structs of plain columns.

Prompts and log-probabilities are binary fields that decode to views of the received frame, so they
are never copied into Python objects.
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
"""Restarts of the front end, modulo 256: a restarted front end does not reuse the keys of its
predecessor."""


def engine_of(key: int) -> int:
    """Number of the engine that has the request with this key."""
    return (key >> ENGINE_SHIFT) & 0xFF


COMPILE_GRAMMAR = "compile_grammar"
"""Control with the arguments `spec`, a GrammarSpec as a list, and `client`, the API key or address
whose turn it takes; fails when the grammar cannot be compiled."""


LOAD_ADAPTER, UNLOAD_ADAPTER = "load_lora_adapter", "unload_lora_adapter"
"""Controls with the arguments `adapter` (a NamedAdapter) and `client`, like COMPILE_GRAMMAR's, and
with `lora_name`. UNLOAD_ADAPTER returns the number of requests that still use the adapter."""
REGISTER_ADAPTER = "register_lora_adapter"
"""The control that replaces LOAD_ADAPTER in the engine, once the adapter's files were checked."""

SLEEP, WAKE_UP = "sleep", "wake_up"
WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""Tags of WAKE_UP: the memory to restore."""

AWAKE, FALLING_ASLEEP = "awake", "falling_asleep"
ASLEEP = ("weights_offloaded", "discard_all")
"""Sleep levels 1 and 2, with the names of vLLM's metric."""


class Resumption(msgspec.Struct, array_like=True, gc=False):
    """Output that a request had received from an engine that crashed; another engine continues
    after it."""

    output: memoryview
    """Output tokens; uint32, little-endian."""
    num_prompt_logprobs: int = 0
    """Prompt positions whose log-probabilities the request has received."""
    is_suspect: bool = False
    """An engine crashed while it computed the next token of the request. The request is isolated:
    the engine starts it only when no other request could cause the next crash."""


UNSENT = 0
"""Key of a request that has not been sent."""
NO_SAMPLING = SamplingParams()
"""Sampling of a pooling request."""


class AddRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=1):
    """A sequence to generate. A request with n choices sends n sequences with derived seeds."""

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
    """The request's name in logs."""
    pooling: PoolingParams | None = None
    """Set for a pooling request, which returns vectors in place of tokens; `sampling` is then
    ignored."""
    is_continuation: bool = False
    """The sequence continues a request that was accepted before (a beam with another token) and is
    scheduled before all waiting requests."""
    images: list[ImagePlacement] = []
    """Images whose placeholder tokens are in the prompt."""
    encoded_images: list[EncoderInput] = []
    """Inputs of the vision tower for `images`, once for each distinct content."""
    resumption: Resumption | None = None
    """Set if an engine that crashed had accepted the request, which is then exempt from the limit
    on waiting requests."""
    timeout_s: float = 0.0
    """Seconds after its arrival at which the request ends with an error; 0: no limit. Set by
    EngineClient.add."""
    tenant: int = 0
    """Number of the API key, for fair shares; 0: no API key. Set by EngineClient.add."""
    group: int = 0
    """Key of an earlier text of the same pooling request; 0: this text is the first text."""


class Abort(msgspec.Struct, array_like=True, gc=False, tag=2):
    """Abort these requests; unknown keys are ignored. No more output is sent for them."""

    keys: list[int]


class Control(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=3):
    """A call that gets a Reply. Names: reset_prefix_cache, ping, start_profile and stop_profile
    (the value is the name of the trace file), shapes (of launches, see StepStats.shapes),
    sleep_state, SLEEP and WAKE_UP (see engine/core/engine_core.py), COMPILE_GRAMMAR, LOAD_ADAPTER
    and UNLOAD_ADAPTER."""

    call: int
    name: str
    arguments: dict[str, Any] = {}


class CancelControl(msgspec.Struct, array_like=True, gc=False, tag=4):
    """Cancel a COMPILE_GRAMMAR, or a LOAD_ADAPTER whose adapter is not being read yet: its caller
    waits no longer. No Reply follows. Other controls and unknown calls are not affected."""

    call: int


ToEngine = AddRequest | Abort | Control | CancelControl


SLEEPING = "the engine sleeps"
"""`Finish.error` of requests that a sleeping engine ends or rejects."""


class Finish(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The last message for a key. Times are seconds in the queue, in prefill and in decode."""

    key: int
    reason: str
    """stop, length, abort or error."""
    stop_token: int | None = None
    """The stop_token_ids entry that ended the sequence; None for an end token."""
    error: str | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_preemptions: int = 0
    param: str | None = None
    """The request parameter that `error` is about; empty for the request as a whole, None for an
    internal error."""
    is_retryable: bool = False
    """The engine is asleep or has no room: a retry may succeed later."""
    is_timeout: bool = False
    """AddRequest.timeout_s has passed; `error` says how far the request got."""


class EngineStats(msgspec.Struct, omit_defaults=True, gc=False):
    """Gauges of an engine, and its counters since the start. Sent with steps, and on change."""

    running: int = 0
    waiting: int = 0
    waiting_prompt_tokens: int = 0
    oldest_waiting_s: float = 0.0
    """Time in the queue of the request that has waited longest; 0 if no request waits."""
    blocks_used: int = 0
    blocks_total: int = 0
    sleep: str = AWAKE
    """AWAKE, FALLING_ASLEEP (new requests are rejected, open ones may finish) or one of ASLEEP."""
    preemptions: int = 0
    prefill_tokens_per_s: float = 0.0
    """Prefill rate (see PrefillRate); 0 if it is not measured."""
    prefilling_tokens: int = 0
    """Prompt tokens of running requests that are not computed yet; set if the rate is measured."""
    waiting_shares: list[tuple[int, int, int]] = []
    """(priority, tenant, tokens) of waiting requests; set if the rate is measured."""
    waiting_tenants: int = 0
    """API keys with waiting requests; set with fair shares."""
    tenant_tokens: dict[str, int] = {}
    """Tokens served to each API key, set with fair shares. Prompt tokens that are not cached count
    when a request starts, output tokens when it ends."""
    steps: int = 0
    lookups: dict[str, int] = {}
    """'prefill.hit', 'decode.miss', ...: counts."""
    useful_tokens: dict[str, int] = {}
    """Useful tokens by phase."""
    padding_tokens: dict[str, int] = {}
    compilations: dict[str, int] = {}
    """'prefill.warmup', 'decode.serving', ...: counts."""
    compile_seconds: dict[str, float] = {}
    """Total compilation time by period: 'warmup', 'serving'."""
    recompilations: int = 0
    """Recompilations after warm-up, counted by the device's runtime; 0 if the runtime does not
    count."""
    cpu_fallbacks: int = 0
    """Operations of the device that ran on the host after warm-up."""
    recipes: dict[str, int] = {}
    """'hit', 'miss': lookups in the runtime's cache of compiled recipes."""
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
    """Rows of embeddings that the vision tower was asked to compute."""
    spec_decode: dict[str, int] = {}
    """'num_drafts' (per request and step), 'num_draft_tokens', 'num_accepted_tokens', and
    'accepted.0', ...: accepted drafts by position. Empty without speculation."""
    kv_offload: dict[str, int] = {}
    """KVOffload.gauges: offloaded blocks; empty without offloading."""
    step_tokens: list[int] = []
    """Tokens of each step since the last stats were sent (OutputProcessor.num_step_tokens)."""
    step_seconds: list[tuple[int, float]] = []
    """(phase, seconds) of each launch since the last stats were sent."""


class StepOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=4):
    """All output of a step for a single front end, in columns."""

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
    """(key, positions) for prompt tokens from index 1, in chunks; sent before the key's first
    token."""
    vectors: list[tuple[int, int, memoryview]] = []
    """(key, rows, float32 little-endian): the result of a pooling request, sent in the same message
    as its Finish."""
    finished: list[Finish] = []
    stats: EngineStats | None = None


class Reply(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=5):
    """Answer to a Control: a value, or an error."""

    call: int
    value: Any = None
    error: str | None = None
    is_refusal: bool = False
    """The error is a UserError."""
    code: str | None = None
    """The UserError's code, which clients may match on."""
    is_overload: bool = False
    """The error is Overloaded: a retry may succeed later."""


class Hello(msgspec.Struct, array_like=True, gc=False, tag=6):
    """First message of an engine to a front end."""

    engine: int
    pid: int


LOAD = "load"
"""Progress stage of weight loading; counts bytes."""
BACKGROUND_WARMUP = "later"
"""Progress stage after Ready: buckets that are warmed up while the engine is idle."""


class Progress(msgspec.Struct, array_like=True, gc=False, tag=7):
    """Progress of the start-up."""

    engine: int
    stage: str
    done: int
    total: int
    left_s: float = 0.0
    """Expected remaining seconds; 0 if unknown."""

    @property
    def counts(self) -> str:
        """`12 of 97`; for weights, which are counted in bytes, `1.25 GiB of 16.06 GiB`."""
        if self.stage == LOAD:
            return f"{bytes_text(self.done)} of {bytes_text(self.total)}"
        return f"{self.done} of {self.total}"

    @property
    def text(self) -> str:
        """`warmup, 12 of 97`; only the stage if it has no counts."""
        return f"{self.stage}, {self.counts}" if self.total else self.stage


class Ready(msgspec.Struct, array_like=True, gc=False, tag=8):
    """The engine accepts requests."""

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
    """Set for a pooling model, which returns vectors and no tokens."""
    ranks: list[RankFacts] = []
    """Facts of each worker, by rank; empty for a single worker."""
    request_tiles: int = 0
    prompt_vocab_size: int = 0
    """`request_tiles` and `prompt_vocab_size`: see WorkerReady."""
    ready_unix_s: float = 0.0
    """Time at which the engine became ready, in seconds since 1970."""


class Failed(msgspec.Struct, array_like=True, gc=False, tag=9):
    """The engine has ended; every open request ends with EngineDied, unless it is resumed."""

    engine: int
    message: str
    is_config: bool = False
    """The failure is a ConfigError."""
    may_follow: bool = False
    """The failure may be a consequence of another engine's end; set where engines share experts."""
    is_stopped: bool = False
    """The engine was told to stop."""
    is_external: bool = False
    """The cause lies outside of the engine's computation."""
    is_profile: bool = False
    """The end is a ProfileWritten."""


class PromptBlocks(msgspec.Struct, array_like=True, gc=False, tag=10):
    """Block hashes of the full blocks of a prompt that another front end sent to the engine, so
    that every router can estimate the engine's prefix cache."""

    hashes: list[bytes]


class Adapters(msgspec.Struct, array_like=True, gc=False, tag=11):
    """All adapters that the engine serves; sent at the start and on each change."""

    infos: list[LoRAInfo]


FromEngine = Adapters | StepOutput | Reply | Hello | Progress | Ready | Failed | PromptBlocks
