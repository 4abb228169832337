"""Messages between server and engine: tagged structs of plain columns.

Prompts and log-probabilities are binary fields that decode to views of the received frame, so they
are never copied into Python objects.
"""

from typing import Any

import msgspec

from config.lora.info import LoRAInfo
from config.params.pooling import PoolingFacts, PoolingParams
from config.params.sampling import SamplingParams
from hpu.protocol import EncodedImage as EncodedImage
from hpu.protocol import ImagePlacement as ImagePlacement
from hpu.protocol import InputTensor as InputTensor
from hpu.protocol import Logprobs as Logprobs
from hpu.protocol import RankFacts

FRONT_END_SHIFT = 48
"""A key is (front end index << 48) | (engine << 40) | (restart << 32) | serial number."""

ENGINE_SHIFT = 40
"""The engine has 8 bits of a key: config/data_parallel.py holds it below 256."""
RESTART_SHIFT = 32
"""So has the number of the front end's restarts, modulo 256: no request has a key that a front end
which died had given to another."""


def engine_of(key: int) -> int:
    """The engine that has the request with this key."""
    return (key >> ENGINE_SHIFT) & 0xFF


COMPILE_GRAMMAR = "compile_grammar"
"""Control with a `spec`, a GrammarSpec as a list; an error when it cannot be compiled."""


LOAD_ADAPTER, UNLOAD_ADAPTER = "load_lora_adapter", "unload_lora_adapter"
"""Controls with an `adapter`, a NamedAdapter, and with a `lora_name`, of which the value is the
number of requests that still use it."""
REGISTER_ADAPTER = "register_lora_adapter"
"""What LOAD_ADAPTER becomes in the engine, once the adapter's files were checked."""

SLEEP, WAKE_UP = "sleep", "wake_up"
WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""The tags of WAKE_UP: the memory to restore."""

AWAKE, FALLING_ASLEEP = "awake", "falling_asleep"
ASLEEP = ("weights_offloaded", "discard_all")
"""Levels 1 and 2, as in vLLM's metric."""


class Resumption(msgspec.Struct, array_like=True, gc=False):
    """What a request had received from an engine that died; another one goes on behind it."""

    output: memoryview
    """Its tokens, uint32, little-endian."""
    num_prompt_logprobs: int = 0
    """Prompt positions whose log-probabilities it has."""
    is_suspect: bool = False
    """An engine died while it computed its next token: it starts when no other request may be the
    cause of another death."""


UNSENT = 0
"""Key of a request that has not been sent."""
NO_SAMPLING = SamplingParams()
"""Sampling of a request for vectors."""


class AddRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=1):
    """One sequence to generate (a request with n choices sends n, with derived seeds)."""

    key: int
    """Set by EngineClient.add, which gives each sequence a key of its own."""
    prompt: memoryview
    """Bytes of uint32, little-endian."""
    sampling: SamplingParams
    priority: int = 0
    """Smaller runs first, under the priority policy."""
    cache_salt: str = ""
    adapter: str = ""
    """Hash of the adapter's files (LoRAInfo.content); empty for none."""
    name: str = ""
    """The request's name in logs."""
    pooling: PoolingParams | None = None
    """Makes it a request for vectors instead of tokens; `sampling` is then ignored."""
    is_continuation: bool = False
    """It continues a request that was accepted before (a beam with one more token): it is scheduled
    before all waiting requests."""
    images: list[ImagePlacement] = []
    """Their tokens are in the prompt."""
    encoded_images: list[EncodedImage] = []
    """What the vision tower needs of `images`, each content once."""
    resumption: Resumption | None = None
    """It was accepted by an engine that died: it is exempt from the limit on waiting requests."""
    timeout_s: float = 0.0
    """It ends with an error so long after it has arrived; 0: no limit. Set by EngineClient.add."""
    tenant: int = 0
    """Stands for the API key among which the engine is shared; 0: none. Set by
    EngineClient.add."""


class Abort(msgspec.Struct, array_like=True, gc=False, tag=2):
    """Abort these requests; unknown keys are ignored. Nothing more is sent for them."""

    keys: list[int]


class Control(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=3):
    """A call that gets one Reply. Names: reset_prefix_cache, ping, start_profile and stop_profile
    (the value is the name of the trace file), shapes (of launches, see StepStats.shapes), SLEEP and
    WAKE_UP (see engine/core/engine_core.py), and COMPILE_GRAMMAR."""

    call: int
    name: str
    arguments: dict[str, Any] = {}


ToEngine = AddRequest | Abort | Control


SLEEPING = "the engine sleeps"
"""`Finish.error` of requests that an engine ends, or refuses, because it sleeps."""


class Finish(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The last message about a key. Times are those in the queue, in prefill and in decode."""

    key: int
    reason: str
    """stop, length, abort or error."""
    stop_token: int | None = None
    """The stop_token_ids entry that ended it; None for an end token."""
    error: str | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_preemptions: int = 0
    param: str | None = None
    """The caller's parameter that `error` is about, empty for the request as a whole; None for an
    internal error."""
    is_retryable: bool = False
    """The engine sleeps or has no room: the same request may succeed later."""
    is_timeout: bool = False
    """AddRequest.timeout_s has passed; `error` says what it had reached."""


class EngineStats(msgspec.Struct, omit_defaults=True, gc=False):
    """One engine's gauges, and its counters since the start. Sent with steps, and on change."""

    running: int = 0
    waiting: int = 0
    waiting_prompt_tokens: int = 0
    oldest_waiting_s: float = 0.0
    """How long the request that waits longest has waited in the queue; 0 if none waits."""
    blocks_used: int = 0
    blocks_total: int = 0
    sleep: str = AWAKE
    """AWAKE, FALLING_ASLEEP (new requests are rejected, open ones may finish) or one of ASLEEP."""
    preemptions: int = 0
    prefill_tokens_per_s: float = 0.0
    """See PrefillRate; 0 if it is not measured."""
    prefilling_tokens: int = 0
    """Of running requests, prompt tokens that are still to be computed; with the rate."""
    waiting_shares: list[tuple[int, int, int]] = []
    """(priority, tenant, tokens) of waiting requests; with the rate."""
    waiting_tenants: int = 0
    """With fair shares: API keys that have waiting requests."""
    tenant_tokens: dict[str, int] = {}
    """With fair shares: tokens that each was served, of a request's output when it ended."""
    steps: int = 0
    lookups: dict[str, int] = {}
    """'prefill.hit', 'decode.miss', ...: counts."""
    useful_tokens: dict[str, int] = {}
    """By phase."""
    padding_tokens: dict[str, int] = {}
    compilations: dict[str, int] = {}
    """'prefill.warmup', 'decode.serving', ...: counts."""
    compile_seconds: dict[str, float] = {}
    """'warmup', 'serving': total time of their compilations."""
    recompilations: int = 0
    """After warm-up, as the device's runtime counts them; 0 where it does not."""
    cpu_fallbacks: int = 0
    """Operations of the device that ran on the host after warm-up."""
    recipes: dict[str, int] = {}
    """'hit', 'miss': lookups in the runtime's cache of compiled recipes."""
    graphs: int = 0
    graph_bytes: int = 0
    max_loras: int = 0
    """Adapters that may run at once; 0: none are served."""
    lora_running: dict[str, int] = {}
    """Running requests of each adapter that has any."""
    lora_waiting: dict[str, int] = {}
    lora_loads: int = 0
    """Adapters read to host memory."""
    lora_load_failures: int = 0
    lora_evictions: int = 0
    """Adapters dropped from host memory."""
    lora_bytes: int = 0
    """Of the adapters in host memory."""
    encoder_cache_tokens: int = 0
    """Rows of image embeddings that the workers keep."""
    encoder_cache_queries: int = 0
    """Images of scheduled chunks that were looked up among them."""
    encoder_cache_hits: int = 0
    encoded_images: int = 0
    encoded_image_tokens: int = 0
    """Rows of embeddings that the vision tower was asked for."""
    spec_decode: dict[str, int] = {}
    """'num_drafts' (of requests and steps), 'num_draft_tokens', 'num_accepted_tokens', and
    'accepted.0', ...: accepted drafts by position. Empty without speculation."""
    kv_offload: dict[str, int] = {}
    """KVOffload.gauges: blocks that left the device; empty where none do."""
    step_tokens: list[int] = []
    """Tokens of each step since the last stats were sent (OutputProcessor.num_step_tokens)."""
    step_seconds: list[tuple[int, float]] = []
    """(phase, seconds) of each launch since the last stats were sent."""


class StepOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=4):
    """Everything that one step produced for one front end, in columns."""

    step: int
    started: list[int] = []
    """Keys scheduled for the first time."""
    started_cached: list[int] = []
    """Their prompt tokens found in the prefix cache."""
    keys: list[int] = []
    counts: list[int] = []
    """Tokens of each key in `tokens`; empty when each has one."""
    tokens: list[int] = []
    logprobs: list[tuple[int, Logprobs]] = []
    """(key, positions): in the order of the key's tokens."""
    prompt_logprobs: list[tuple[int, Logprobs]] = []
    """(key, positions): prompt tokens 1 .. in chunks, all before the key's first token."""
    vectors: list[tuple[int, int, memoryview]] = []
    """(key, rows, float32 little-endian): the result of a pooling request, whose Finish is in the
    same message."""
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
    """The error is Overloaded: the same call may succeed later."""


class Hello(msgspec.Struct, array_like=True, gc=False, tag=6):
    """The first message of an engine to a front end."""

    engine: int
    pid: int


LOAD = "load"
"""Stage of Progress in which weights are loaded; it counts bytes."""
LATER = "later"
"""Stage of the progress after Ready: buckets that are warmed up while the engine is idle."""


class Progress(msgspec.Struct, array_like=True, gc=False, tag=7):
    """Progress of the start-up."""

    engine: int
    stage: str
    done: int
    total: int
    left_s: float = 0.0
    """Expected; 0 if unknown."""

    @property
    def counts(self) -> str:
        """`12 of 97`; of weights, which are counted in bytes, `1.25 of 16.06 GB`."""
        if self.stage == LOAD:
            return f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB"
        return f"{self.done} of {self.total}"

    @property
    def text(self) -> str:
        """`warmup, 12 of 97`; the stage alone where nothing is counted."""
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
    """What the log-probabilities of sampled tokens are: one of config.engine.LOGPROBS_MODES."""
    pooling: PoolingFacts | None = None
    """Set when the model gives vectors, and no tokens."""
    ranks: list[RankFacts] = []
    """Of the workers, by rank, where several run one model."""
    request_tiles: int = 0
    prompt_vocab_size: int = 0
    """As in WorkerReady."""
    ready_unix_s: float = 0.0
    """When the engine became ready, in seconds since 1970."""


class Failed(msgspec.Struct, array_like=True, gc=False, tag=9):
    """The engine is gone; every open request ends with EngineDied."""

    engine: int
    message: str
    is_config: bool = False
    """It is a ConfigError."""
    may_follow: bool = False
    """Where engines share experts, the end of another engine may be the cause."""
    is_stopped: bool = False
    """It was told to stop."""
    is_external: bool = False
    """What it computed is not the cause."""


class PromptBlocks(msgspec.Struct, array_like=True, gc=False, tag=10):
    """The hashes of the full blocks of a prompt that an engine was sent by another front end: every
    router knows what each engine has cached."""

    hashes: list[bytes]


class Adapters(msgspec.Struct, array_like=True, gc=False, tag=11):
    """All adapters that the engine serves; sent at the start and with each change."""

    infos: list[LoRAInfo]


FromEngine = Adapters | StepOutput | Reply | Hello | Progress | Ready | Failed | PromptBlocks
