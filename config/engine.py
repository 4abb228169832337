"""EngineConfig: everything an engine and its workers are told. Checked here, never adjusted."""

from dataclasses import dataclass, field

from config.buckets import BucketConfig
from config.errors import ConfigError
from config.execution import EmulatorSettings, ExecutionConfig, WarmupConfig

CPU_KERNELS = ("auto", "torch")
QUANTIZATIONS = ("none", "int8", "int4", "gguf")
DEVICES = ("auto", "cpu", "cuda", "hpu", "hpu-emulator")
DTYPES = ("auto", "bfloat16", "float16", "float32")
EXECUTORS = ("auto", "inline", "processes")
POLICIES = ("fcfs", "priority")
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed")
PROMPTS_A_LAUNCH, TEXTS_A_LAUNCH = 4, 16


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}, it must be one of {', '.join(allowed)}")


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name} is {value}, it must be at least {least}")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = None
    """Tokens in a block; None takes the device's (128 on HPU, smaller on CPU)."""
    num_blocks: int | None = None
    """Blocks; None measures what fits."""
    gpu_memory_utilization: float = 0.9
    """Share of the free device memory that may be used (vLLM: gpu_memory_utilization)."""
    kv_cache_memory_bytes: int | None = None
    """KV cache size in bytes; overrides the measurement (on CPU the default is what
    max_num_seqs full contexts need, within a quarter of the free memory)."""
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        _at_least("num_blocks", self.num_blocks, 2)
        _at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, "
                "it must be above 0, at most 1"
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who runs, and how much at once."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_prefill_batch: int | None = None
    """Prompts merged into one launch at most; None: few, or many of the short texts that a pooling
    model reads, where each number of them is a bucket; else as many as a step has."""
    policy: str = "fcfs"
    max_inflight_steps: int = 2
    """Steps in flight; 1 switches the overlap off."""
    max_queue_len: int = 100_000
    """Requests an engine lets wait, whatever the front-ends allow (a bound for the inbox)."""

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("max_prefill_batch", self.max_prefill_batch, 1)
        _at_least("max_queue_len", self.max_queue_len, 1)
        _one_of("policy", self.policy, POLICIES)
        if self.max_inflight_steps not in (1, 2):
            raise ConfigError(f"max_inflight_steps is {self.max_inflight_steps}, it must be 1 or 2")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, it must be at least "
                f"max_num_seqs, which is {self.max_num_seqs}"
            )

    def prompts_a_launch(self, *, pools: bool = False, exact: bool = False) -> int:
        """`max_prefill_batch`, or what it is by default; `pools`: for a pooling model; `exact`:
        where launches are not padded to buckets."""
        if self.max_prefill_batch is not None:
            return self.max_prefill_batch
        if exact:
            return self.max_num_seqs
        return min(self.max_num_seqs, TEXTS_A_LAUNCH) if pools else PROMPTS_A_LAUNCH


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: a model on a device, its cache, its schedule, its buckets."""

    model: str
    """A folder, a GGUF file, or a hub id."""
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    """Tokens of prompt and output together; None takes the checkpoint's own."""
    seed: int = 0
    executor: str = "auto"
    num_threads: int | None = None
    """Compute threads on CPU; None takes the cores the process may use."""
    cpu_kernels: str = "auto"
    """What computes on CPU: kernels compiled for it where that is possible, or torch's own."""
    quantization: str | None = None
    """How many bits the weights of products have on CPU: int8, int4, or those of the GGUF file."""
    logprobs_mode: str = "raw_logprobs"
    """What is reported of sampled tokens: before or after masks, penalties, temperature and
    filters; normalised or not. Of prompt tokens it is always the raw log-probability."""
    enforce_eager: bool = False
    """No captured graphs."""
    cache_dir: str | None = None
    """Where converted checkpoints and compiled code are kept; None: the user's cache folder."""
    revision: str | None = None
    runner: str = "auto"
    """Whether the model gives tokens or vectors."""
    convert: str = "auto"
    """What a model that gives tokens is made to give by the runner `pooling`."""
    pooler_config: str = ""
    """JSON: how hidden states become vectors, where the checkpoint's own files are not meant."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    buckets: BucketConfig = field(default_factory=BucketConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    emulator: EmulatorSettings = field(default_factory=EmulatorSettings)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model is empty, it must name a folder, a GGUF file or a hub id")
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("executor", self.executor, EXECUTORS)
        _one_of("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        _one_of("runner", self.runner, RUNNERS)
        _one_of("convert", self.convert, CONVERSIONS)
        _at_least("max_model_len", self.max_model_len, 1)
        _one_of("cpu_kernels", self.cpu_kernels, CPU_KERNELS)
        _one_of("quantization", self.quantization or "none", QUANTIZATIONS)
        if self.quantization is not None and self.dtype not in ("auto", "bfloat16"):
            raise ConfigError(
                f"quantization is {self.quantization} and dtype {self.dtype}: weights in few bits "
                "are multiplied in bfloat16"
            )
        if self.quantization is not None and self.device not in ("auto", "cpu"):
            raise ConfigError(
                f"quantization is {self.quantization} and device {self.device}: it is there on cpu"
            )
        _at_least("num_threads", self.num_threads, 1)
        if self.execution.contiguous_pa and self.cache.enable_prefix_caching:
            raise ConfigError(
                "contiguous_pa and enable_prefix_caching are both on: blocks that rows share "
                "cannot be read as one slice, so one of them must go"
            )
