"""EngineConfig: the settings of an engine and its workers. Validates values without adjusting
them."""

from dataclasses import dataclass, field

from config.buckets import BucketConfig
from config.data_parallel import DataParallelConfig
from config.devices.base import DEVICES
from config.errors import ConfigError, SettingError
from config.execution import EmulatorSettings, ExecutionConfig, WarmupConfig
from config.model.kv_cache_dtype import FP8, FP8_INC, INT8, KV_CACHE_DTYPES, SPELLINGS
from config.model.model_config import AUTO, MODEL_IMPLS, NATIVE, TRANSFORMERS
from config.model.quantization.base import QUANTIZATION_FORMATS
from config.model.quantization.inc import INC, VARIABLE
from config.model.quantization.registry import KERNELS, OTHER_NAMES, SCHEMES_AT_LOAD
from config.parallel import ParallelConfig
from config.params.lora import LoRAConfig
from config.params.offload import OffloadConfig
from config.params.speculation import SpeculationConfig
from config.setting import check_settings, metadata, setting

DUMMY = "dummy"
"""Value of EngineConfig.load_format for random weights."""
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
OF_CHECKPOINTS = tuple(QUANTIZATION_FORMATS.all)
"""Values of EngineConfig.quantization for checkpoints that are already quantized."""
AT_LOAD = ("int8", "int4", "gguf")
"""Values of EngineConfig.quantization only for CPU: they quantize weights while loading, or keep
the blocks of a GGUF file. SCHEMES_AT_LOAD has further values."""
RAY = "ray"
EXTERNAL_LAUNCHER = "external_launcher"
EXECUTORS = ("auto", "uni", "mp", RAY, EXTERNAL_LAUNCHER)
DEFAULT_PREFILL_BATCH, DEFAULT_MERGED_BATCH, DEFAULT_POOLING_BATCH = 1, 4, 16
DEFAULT_TOKEN_BUDGET = 2048
MAX_NUM_SEQS = 65_536
"""Maximum of SchedulerConfig.max_num_seqs. A worker allocates an array with a row for each
sequence and 4 bytes for each token of the context: 2 GiB for a context of 8192 tokens."""
DEFAULT_MEMORY_UTILIZATION = 0.9


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of the paged KV cache."""

    block_size: int | None = setting(
        None,
        "Tokens per KV-cache block; auto: the device's (128 on HPU)",
        minimum=1,
    )
    num_blocks: int | None = setting(
        None,
        "KV-cache blocks; auto: as many as fit",
        name="num-gpu-blocks-override",
        aliases=("num-blocks",),
        minimum=2,
    )
    gpu_memory_utilization: float = setting(
        DEFAULT_MEMORY_UTILIZATION,
        "Fraction of the free device memory to use; no effect on CPU",
        aliases=("memory-utilization",),
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "Bytes of the KV cache; auto: measured; on CPU at most a tenth of the free "
        "memory, or a quarter for one full context",
        minimum=1,
    )
    cross_attention_images: int = setting(
        1,
        "Maximum images of a request with cross attention (Llama 3.2 Vision); memory is "
        "reserved for up to 16 requests",
        minimum=1,
        maximum=64,
    )
    enable_prefix_caching: bool = setting(True, "Reuse cached blocks of earlier prompts")
    kv_cache_dtype: str = setting(
        "auto",
        "Data type of the KV cache; auto: the model's; fp8, fp8_inc: e4m3 with the "
        "checkpoint's scales; int8: on CPU",
        choices=KV_CACHE_DTYPES,
        spellings=SPELLINGS,
    )
    calculate_kv_scales: bool = setting(
        False,
        "Calculate the scales of an FP8 KV cache from random tokens",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.calculate_kv_scales and self.kv_cache_dtype not in (FP8, FP8_INC):
            raise ConfigError(
                f"calculate_kv_scales is set and kv_cache_dtype is {self.kv_cache_dtype}: set "
                f"kv_cache_dtype to {FP8} or {FP8_INC}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, "
                "it must be above 0, at most 1"
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler: which requests run, and how many at once."""

    max_num_seqs: int = setting(
        32, "Maximum sequences that run at once", minimum=1, maximum=MAX_NUM_SEQS
    )
    max_num_batched_tokens: int | None = setting(
        None,
        f"Maximum tokens in a step; auto: the largest of {DEFAULT_TOKEN_BUDGET}, --max-num-seqs "
        "and, where steps compute whole prompts, --max-model-len",
        minimum=1,
    )
    enable_chunked_prefill: bool = setting(
        True,
        "Split prompts into chunks; off: steps compute whole prompts, and "
        "--max-num-batched-tokens must be at least --max-model-len",
    )
    max_prefill_batch: int | None = setting(
        None,
        "Maximum prompts in a prefill launch; auto: --prompt-bs-bucket-max, else 1 (4 "
        "with --use-merged-prefill, 16 for a pooling model), on CPU --max-num-seqs",
        aliases=("max-num-prefill-seqs",),
        minimum=1,
    )
    merged_prefill: bool = setting(
        False,
        "HPU: put the prompts of a launch into one row, with less padding and more attention",
        name="use-merged-prefill",
        variables=("VLLM_MERGED_PREFILL",),
    )
    policy: str = setting(
        "fcfs",
        "Order of waiting requests: first come first served, or by priority",
        name="scheduling-policy",
        choices=("fcfs", "priority"),
    )
    fair_share: bool = setting(
        False,
        "Among requests of equal priority, serve the API key with the fewest served tokens first",
    )
    max_ttft_s: float = setting(
        0.0,
        "Answer with 503 if the estimated seconds to the first token exceed this; 0: no limit",
        name="max-ttft",
        minimum=0,
    )
    max_inflight_steps: int = setting(
        2,
        "Maximum steps in flight, or the number of pipeline stages if larger; 1: no "
        "asynchronous scheduling",
        name="overlap-depth",
        switches={"async-scheduling": (2, 1), "delayed-sampling": (2, 1)},
        switch_variables={"VLLM_DELAYED_SAMPLING": "delayed-sampling"},
    )
    num_scheduler_steps: int = setting(
        1,
        "Decode iterations per step, whose tokens arrive together; 1 in steps with "
        "prompts, grammars, drafts or pipeline stages",
        aliases=("num-scheduler-seqs",),
        minimum=1,
        maximum=64,
    )
    max_queue_len: int = setting(
        100_000,
        "Maximum waiting requests in an engine",
        name="max-waiting",
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_inflight_steps not in (1, 2):
            raise ConfigError(f"max_inflight_steps is {self.max_inflight_steps}, it must be 1 or 2")
        if self.token_budget() < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.token_budget()}, it must be at least "
                f"max_num_seqs, which is {self.max_num_seqs}"
            )

    def token_budget(self, max_model_len: int = 0, *, is_pooling: bool = False) -> int:
        """`max_num_batched_tokens` or its default, which is at least `max_num_seqs` and, if a step
        computes whole texts, `max_model_len`. Steps compute whole texts for pooling models and
        without chunked prefill."""
        longest = 0 if self.enable_chunked_prefill and not is_pooling else max_model_len
        return self.max_num_batched_tokens or max(DEFAULT_TOKEN_BUDGET, self.max_num_seqs, longest)

    def check_whole_prompts(self, max_model_len: int) -> None:
        """Raise SettingError if chunked prefill is off and a step cannot compute a prompt of
        `max_model_len` tokens."""
        budget = self.token_budget(max_model_len)
        if not self.enable_chunked_prefill and budget < max_model_len:
            raise SettingError(
                f"--max-num-batched-tokens is {budget} and --max-model-len is {max_model_len}: "
                "with --no-enable-chunked-prefill a prompt is computed in one step, so set "
                f"--max-num-batched-tokens to {max_model_len} or more, or --max-model-len to "
                f"{budget} or less"
            )

    def prefill_batch(self, *, is_pooling: bool = False, is_exact: bool = False) -> int:
        """`max_prefill_batch` or its default; `is_exact`: launches are not padded to buckets."""
        if self.max_prefill_batch is not None:
            return self.max_prefill_batch
        if is_exact:
            return self.max_num_seqs
        if is_pooling:
            return min(self.max_num_seqs, DEFAULT_POOLING_BATCH)
        return DEFAULT_MERGED_BATCH if self.merged_prefill else DEFAULT_PREFILL_BATCH


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine: a model on a device, with its cache, scheduler and buckets."""

    model: str = field(
        metadata=metadata(
            "Model folder, .gguf file or Hugging Face id",
            metavar="MODEL",
        )
    )
    revision: str | None = setting(None, "Branch, tag or commit of a Hugging Face model")
    download_dir: str | None = setting(
        None,
        "Folder for downloaded models; none: the hub's cache (HF_HOME)",
        metavar="DIR",
    )
    dtype: str = setting(
        "auto",
        "Data type of weights and activations",
        choices=("auto", "bfloat16", "float16", "float32"),
        spellings={"half": "float16", "float": "float32"},
    )
    hf_overrides: str = setting(
        "",
        'Fields of config.json to replace: {"max_position_embeddings": 8192}',
        metavar="JSON",
    )
    max_model_len: int | None = setting(
        None,
        "Maximum tokens of prompt and output; auto: the checkpoint's, at most 512 on hpu-emulator",
        minimum=1,
    )
    allow_long_max_model_len: bool = setting(
        False,
        "Allow --max-model-len above the checkpoint's limit; answers may get worse",
        variables=("VLLM_ALLOW_LONG_MAX_MODEL_LEN",),
    )
    logprobs_mode: str = setting(
        "raw_logprobs",
        "Log-probabilities or logits, before (raw) or after (processed) masks, "
        "penalties, temperature and filters; of prompt tokens always raw_logprobs",
        choices=LOGPROBS_MODES,
    )
    handle_topk_duplicates: bool = setting(
        True,
        "Keep all tokens that tie with the k-th of top_k; off: exactly k tokens",
        variables=("VLLM_HANDLE_TOPK_DUPLICATES",),
    )
    model_impl: str = setting(
        AUTO,
        "Code of the model: from gaudiserve (native) or transformers; auto: native if "
        "it has the architecture",
        choices=MODEL_IMPLS,
        spellings={"vllm": NATIVE},
    )
    load_format: str = setting(
        "auto",
        "Source of the weights; auto, safetensors: files, also .gguf; dummy: small "
        "random weights from config.json alone",
        choices=("auto", "safetensors", DUMMY),
        spellings={"hf": "safetensors", "mistral": "auto"},
    )
    runner: str = setting(
        "auto",
        "Output of the model: tokens (generate) or vectors (pooling); auto: by the "
        "checkpoint's config",
        aliases=("task",),
        choices=("auto", "generate", "pooling"),
        spellings=dict.fromkeys(("embed", "embedding", "classify", "score"), "pooling"),
    )
    convert: str = setting(
        "auto",
        "Use a language model for embeddings: always (embed), never (none), or by "
        "--runner or the checkpoint (auto)",
        choices=("auto", "none", "embed"),
    )
    pooler_config: str = setting(
        "",
        'Pooling options: {"pooling_type": "MEAN", "normalize": true}',
        metavar="JSON",
        aliases=("override-pooler-config",),
    )
    seed: int = setting(0, "Random seed of requests without a seed")
    cache_dir: str | None = setting(
        None,
        "Folder for converted checkpoints and compiled code; none: ~/.cache/gaudiserve",
        metavar="DIR",
    )
    device: str = setting(
        "auto",
        "Device to run on",
        group="Device",
        choices=("auto", *DEVICES.all),
        switches={"hpu-emulator": ("hpu-emulator", "auto")},
    )
    executor: str = setting(
        "auto",
        "Where workers run: the engine process (uni), a process per device (mp), Ray "
        "actors (ray), or under torchrun (external_launcher); auto: uni for one worker "
        "on CPU, else mp",
        group="Parallelism",
        name="distributed-executor-backend",
        aliases=("executor",),
        choices=EXECUTORS,
        spellings={"inline": "uni", "processes": "mp"},
    )
    num_threads: int | None = setting(
        None,
        "Compute threads of a worker on CPU; auto: its part of the available cores",
        group="Device",
        variables=("OMP_NUM_THREADS",),
        minimum=1,
    )
    cpu_kernels: str = setting(
        "auto",
        "bfloat16 kernels on CPU; auto: gaudiserve's with a C++ compiler and AVX2, else PyTorch's",
        group="Device",
        choices=("auto", "torch"),
    )
    cpu_int8_activations: bool = setting(
        True,
        "Round activations to 8 bits for 4- and 8-bit weights, with AVX512-VNNI and no "
        "AMX; off: bfloat16, slower",
        group="Device",
        variables=("VLLM_CPU_INT4_W4A8",),
    )
    quantization: str | None = setting(
        None,
        "Weight quantization; none: the checkpoint's. Plain weights are quantized while loading by "
        f"{' and '.join(SCHEMES_AT_LOAD)}, on CPU also by int8, int4 and gguf, on Gaudi by inc "
        "(--quant-config)",
        group="Device",
        choices=(*OF_CHECKPOINTS, *KERNELS, *AT_LOAD, INC),
        spellings={
            **OTHER_NAMES,
            # Name of the compressor in scripts of 2024.
            "hqt": INC,
        },
    )
    quant_config: str | None = setting(
        None,
        "JSON file for --quantization inc, written by `gaudiserve calibrate`",
        metavar="FILE",
        group="Device",
        variables=(VARIABLE,),
    )
    enforce_eager: bool = setting(
        False,
        "Capture no graphs (also -O0); on a Gaudi: mode lazy instead of hpu-graphs, "
        "eager instead of torch-compile",
        group="Device",
    )
    cache: CacheConfig = field(default_factory=CacheConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    buckets: BucketConfig = field(default_factory=BucketConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    emulator: EmulatorSettings = field(default_factory=EmulatorSettings)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model is empty, it must name a folder, a GGUF file or a hub id")
        check_settings(self)
        if self.executor == "uni" and self.parallel.world_size > 1:
            raise ConfigError(
                f"distributed_executor_backend is uni, which runs 1 worker, and "
                f"{self.parallel.world_size} devices run the model: use mp"
            )
        if self.executor == EXTERNAL_LAUNCHER and self.data_parallel.data_parallel_size > 1:
            raise ConfigError(
                "distributed_executor_backend is external_launcher and data_parallel_size is "
                f"{self.data_parallel.data_parallel_size}: external_launcher runs one engine; set "
                "data_parallel_size to 1"
            )
        if self.num_coupled_engines > 1:
            self._check_coupled()
        if self.lora.enable_lora:
            self._check_lora()
        if self.offload.is_on:
            self._check_offload()
        if self.offload.cpu_offload_gb:
            self._check_weight_offload()
        if self.speculation.choose() is not None:
            self._check_speculation()
        if self.quantization in AT_LOAD and self.dtype not in ("auto", "bfloat16"):
            raise ConfigError(
                f"quantization is {self.quantization} and dtype is {self.dtype}: quantized "
                "weights require the dtype bfloat16"
            )
        if self.quantization in AT_LOAD and self.device not in ("auto", "cpu"):
            raise ConfigError(
                f"quantization is {self.quantization} and device is {self.device}: weights are "
                "quantized on cpu only"
            )
        is_other = self.device != "auto" and not DEVICES[self.device].is_gaudi
        if self.quantization == INC and is_other:
            raise ConfigError(
                f"quantization is {INC} and device is {self.device}: the compressor quantizes on "
                "hpu only"
            )
        if self.quantization == "gguf" and self.load_format == DUMMY:
            raise ConfigError(
                "quantization is gguf and load_format is dummy: random weights have no GGUF "
                "blocks; use int4 or int8"
            )
        if self.cache.kv_cache_dtype == INT8 and self.device not in ("auto", "cpu"):
            raise ConfigError(
                f"kv_cache_dtype is int8 and device is {self.device}: keys and values in int8 are "
                "cached on cpu only; use fp8"
            )
        if self.execution.contiguous_pa and self.cache.enable_prefix_caching:
            raise ConfigError(
                "contiguous_pa and enable_prefix_caching are both on: shared blocks cannot be "
                "read as one slice; turn one of them off"
            )

    def _check_lora(self) -> None:
        refusals = {
            "executor is external_launcher": self.executor == EXTERNAL_LAUNCHER,
            "quantization is inc, whose compressor replaces the layers": self.quantization == INC,
            "model_impl is transformers, whose layers take no adapters": (
                self.model_impl == TRANSFORMERS
            ),
            "several engines share experts": self.num_coupled_engines > 1,
        }
        for why, is_refused in refusals.items():
            if is_refused:
                raise ConfigError(f"enable_lora is on and {why}: turn one of them off")

    def _check_offload(self) -> None:
        name = "kv_offloading_size" if self.offload.kv_offloading_size else "swap_space"
        what = f"{name} is {getattr(self.offload, name):g}"
        if not self.cache.enable_prefix_caching:
            raise ConfigError(
                f"{what} and enable_prefix_caching is off: offloaded blocks are found by their "
                f"prefix hashes; set {name} to 0, or turn prefix caching on"
            )
        if self.executor == EXTERNAL_LAUNCHER:
            raise ConfigError(
                f"{what} and distributed_executor_backend is {EXTERNAL_LAUNCHER}, where KV "
                "offloading is not supported: use mp"
            )
        if self.num_coupled_engines > 1:
            raise ConfigError(
                f"{what} and {self.num_coupled_engines} engines step together "
                "(enable_expert_parallel with data_parallel_size), for which KV offloading is "
                f"not supported: set {name} to 0"
            )

    def _check_weight_offload(self) -> None:
        stages = self.parallel.pipeline_parallel_size
        refusals = {
            "enable_lora is on": self.lora.enable_lora,
            "speculative_config is set": self.speculation.choose() is not None,
            f"pipeline_parallel_size is {stages}": stages > 1,
            f"quantization is {self.quantization}": self.quantization is not None,
            "model_impl is transformers": self.model_impl == TRANSFORMERS,
            "enable_expert_parallel is on": self.parallel.enable_expert_parallel,
            "regional_compilation is off": not self.execution.regional_compilation,
        }
        for why, is_refused in refusals.items():
            if is_refused:
                raise ConfigError(
                    f"cpu_offload_gb is {self.offload.cpu_offload_gb:g} and {why}: change one of "
                    "the two"
                )

    def _check_speculation(self) -> None:
        engines = self.num_coupled_engines
        if engines > 1:
            raise ConfigError(
                f"speculative_config is set and {engines} engines step together "
                "(enable_expert_parallel with data_parallel_size), for which drafts are not "
                "supported: leave speculative_config out"
            )
        if self.execution.contiguous_pa:
            raise ConfigError(
                "contiguous_pa and speculative_config are both on: rows of one request, which "
                "share its blocks, cannot be read as one slice; turn one of them off"
            )

    def _check_coupled(self) -> None:
        what = (
            f"data_parallel_size is {self.data_parallel.data_parallel_size} and "
            "enable_expert_parallel is set, so that all engines step together"
        )
        if self.parallel.pipeline_parallel_size > 1:
            raise ConfigError(
                f"{what}: pipeline_parallel_size is {self.parallel.pipeline_parallel_size}, it "
                "must be 1"
            )
        if self.executor == RAY:
            raise ConfigError(
                f"{what}: distributed_executor_backend is ray, which runs one engine; use mp"
            )

    @property
    def num_coupled_engines(self) -> int:
        """Number of engines that step in lockstep because experts are distributed over all their
        devices; 1: each engine steps independently."""
        if not self.parallel.enable_expert_parallel:
            return 1
        return self.data_parallel.data_parallel_size

    @property
    def max_inflight_steps(self) -> int:
        """Maximum number of steps in flight: 1 for synchronous scheduling; for asynchronous
        scheduling at least 2, and at least the number of pipeline stages."""
        configured = self.scheduler.max_inflight_steps
        return max(configured, self.parallel.pipeline_parallel_size) if configured > 1 else 1

    @property
    def decodes_per_step(self) -> int:
        """Maximum number of decodes of a request in a step: `num_scheduler_steps`, or 1 if
        `single_decode_reason` has a reason."""
        return 1 if self.single_decode_reason else self.scheduler.num_scheduler_steps

    @property
    def single_decode_reason(self) -> str:
        """Why `num_scheduler_steps` has no effect; empty if it has one."""
        if self.speculation.max_tokens_per_step() > 1:
            return "the next decode starts after the accepted drafts"
        if self.parallel.pipeline_parallel_size > 1:
            return "a sampled token reaches the first pipeline stage in a later step"
        return ""
