"""Every setting of a server, once: its name on the command line, where it goes, what it does.

Types and defaults are those of the dataclass fields. Knows no sources.
"""

from collections.abc import Mapping

from config.buckets import STRATEGIES
from config.engine import (
    CONVERSIONS,
    CPU_KERNELS,
    DEVICES,
    DTYPES,
    EXECUTORS,
    LOGPROBS_MODES,
    POLICIES,
    QUANTIZATIONS,
    RUNNERS,
)
from config.loading.flag import Flag
from config.loading.flags_hpu import DIAGNOSTICS, EMULATOR, EXECUTION, WARMUP
from config.loading.flags_server import LOGS, SERVER, TEXT


def _range_flags(
    dimension: str, name: str, what: str, older: tuple[str, ...] = ()
) -> tuple[Flag, ...]:
    """Least, step and most of one dimension, and its padding, with the names they have in vLLM
    for Gaudi."""
    words = {
        "min": "Least",
        "step": "Step between",
        "max": "Most",
        "pad_max": "padding-aware: most padding of",
        "pad_percent": "padding-aware: most padding, in percent of the bucket, of",
    }
    return tuple(
        Flag(
            "buckets",
            f"{dimension}.{end}",
            "Buckets",
            f"{word} {what}; auto: the strategy's own",
            name=f"{name}-bucket-{end.replace('_', '-')}",
            aliases=tuple(f"{old}-bucket-{end.replace('_', '-')}" for old in older),
            variables=tuple(
                f"VLLM_{one}_BUCKET_{end}".replace("-", "_").upper() for one in (name, *older)
            ),
        )
        for end, word in words.items()
    )


MODEL = (
    Flag("engine", "model", "Model", "Folder, .gguf file or hub id (also the first argument)"),
    Flag("engine", "revision", "Model", "Branch, tag or commit of a hub id"),
    Flag(
        "engine",
        "dtype",
        "Model",
        "Number format of weights and activations",
        choices=DTYPES,
        spellings={"half": "float16", "float": "float32"},
    ),
    Flag(
        "engine",
        "max_model_len",
        "Model",
        "Tokens of prompt and output; auto: the checkpoint's, on hpu-emulator 512 at most",
    ),
    Flag(
        "engine",
        "logprobs_mode",
        "Model",
        "What is reported as the log-probability of a sampled token: what the model says, or what "
        "is left of it after masks, penalties, temperature and filters; normalised, or the logits",
        choices=LOGPROBS_MODES,
    ),
    Flag(
        "engine",
        "runner",
        "Model",
        "What the model gives: tokens (generate) or vectors (pooling); auto: as its files say",
        aliases=("task",),
        choices=RUNNERS,
        spellings=dict.fromkeys(("embed", "embedding", "classify", "score"), "pooling"),
    ),
    Flag(
        "engine",
        "convert",
        "Model",
        "embed: take a language model's hidden states for vectors; none: never",
        choices=CONVERSIONS,
    ),
    Flag(
        "engine",
        "pooler_config",
        "Model",
        'How vectors are made, as JSON: {"pooling_type": "MEAN", "normalize": true}; empty: as the '
        "model's files say",
        aliases=("override-pooler-config",),
    ),
    Flag("engine", "seed", "Model", "Seed of everything that is drawn without a seed of its own"),
    Flag(
        "engine",
        "cache_dir",
        "Model",
        "Folder for converted checkpoints and compiled code; none: ~/.cache/gaudiserve",
    ),
)
DEVICE = (
    Flag(
        "engine",
        "device",
        "Device",
        "What computes",
        choices=DEVICES,
        switches={"hpu-emulator": ("hpu-emulator", "auto")},
    ),
    Flag("engine", "executor", "Device", "Where the worker lives", choices=EXECUTORS),
    Flag(
        "engine",
        "num_threads",
        "Device",
        "Compute threads on CPU; auto: the cores the process may use",
        variables=("OMP_NUM_THREADS",),
    ),
    Flag(
        "engine",
        "cpu_kernels",
        "Device",
        "What computes on CPU in bfloat16; auto: kernels that are compiled at the first start, "
        "where a C++ compiler and AVX512-BF16 are there; torch: its own",
        choices=CPU_KERNELS,
    ),
    Flag(
        "engine",
        "quantization",
        "Device",
        "Bits of the weights on CPU, for more tokens a second at some loss of accuracy: int8 by "
        "output, int4 by 32 inputs (8 for the head), or gguf, the bits of the GGUF file given as "
        "the model, at no loss",
        choices=QUANTIZATIONS[1:],
    ),
    Flag("engine", "enforce_eager", "Device", "Capture no graphs"),
)
CACHE = (
    Flag("cache", "block_size", "KV cache", "Tokens in a block; auto: the device's"),
    Flag(
        "cache",
        "num_blocks",
        "KV cache",
        "Blocks; auto: what fits into memory",
        name="num-gpu-blocks-override",
        aliases=("num-blocks",),
    ),
    Flag(
        "cache",
        "gpu_memory_utilization",
        "KV cache",
        "Share of the free device memory that may be used; on CPU a quarter at most",
        name="gpu-memory-utilization",
        aliases=("memory-utilization",),
    ),
    Flag(
        "cache",
        "kv_cache_memory_bytes",
        "KV cache",
        "Size in bytes (4G is 4 GiB), instead of a measurement",
    ),
    Flag("cache", "enable_prefix_caching", "KV cache", "Keep and reuse the blocks of seen prompts"),
)
SCHEDULER = (
    Flag("scheduler", "max_num_seqs", "Scheduling", "Sequences that run at once"),
    Flag("scheduler", "max_num_batched_tokens", "Scheduling", "Tokens computed in one step"),
    Flag(
        "scheduler",
        "max_prefill_batch",
        "Scheduling",
        "Prompts merged into one launch, at most; auto: --prompt-bs-bucket-max if that is given, "
        "else 4, or 16 for a pooling model; on CPU, where no bucket has to be prepared for each "
        "number, all that a step has tokens for",
        aliases=("max-num-prefill-seqs",),
    ),
    Flag(
        "scheduler",
        "policy",
        "Scheduling",
        "First come first served, or by the request's priority",
        name="scheduling-policy",
        choices=POLICIES,
    ),
    Flag(
        "scheduler",
        "max_inflight_steps",
        "Scheduling",
        "Steps in flight; 1 switches the overlap off",
        name="overlap-depth",
        switches={"async-scheduling": (2, 1), "delayed-sampling": (2, 1)},
        variables_of_switches={"VLLM_DELAYED_SAMPLING": "delayed-sampling"},
    ),
    Flag(
        "scheduler",
        "max_queue_len",
        "Scheduling",
        "Requests an engine lets wait, at most",
        name="max-waiting",
    ),
)
BUCKETS = (
    Flag(
        "buckets",
        "strategy",
        "Buckets",
        "How the padded shapes are chosen",
        name="bucketing-strategy",
        variables=("VLLM_BUCKETING_STRATEGY",),
        choices=("auto", *STRATEGIES),
        spellings={
            "exp": "exponential",
            "exponential_v3": "exponential-v3",
            "lin": "linear",
            "pad": "padding-aware",
            "padding_aware": "padding-aware",
        },
        switches={"exponential-bucketing": ("exponential", "linear")},
        variables_of_switches={"VLLM_EXPONENTIAL_BUCKETING": "exponential-bucketing"},
    ),
    Flag(
        "buckets",
        "file",
        "Buckets",
        "File with the shapes; asks for the strategy 'file'",
        name="bucketing-file",
        aliases=("bucketing-from-file",),
        variables=("VLLM_BUCKETING_FROM_FILE",),
    ),
    Flag(
        "buckets",
        "traffic",
        "Buckets",
        "Lengths of real requests (JSONL, a /metrics page or a request log); asks for the "
        "strategy 'fitted'",
        name="bucketing-traffic",
    ),
    Flag(
        "buckets",
        "num_graphs",
        "Buckets",
        "Buckets that the strategy 'fitted' makes, at most",
        name="bucketing-graphs",
    ),
    *_range_flags("prompt_batch", "prompt-bs", "prompts in a prefill"),
    *_range_flags("prompt_query", "prompt-query", "new tokens of a prompt", ("prompt-seq",)),
    *_range_flags("prompt_context", "prompt-ctx", "cached blocks of a prompt"),
    *_range_flags("decode_batch", "decode-bs", "sequences in a decode"),
    *_range_flags("decode_blocks", "decode-block", "blocks in a decode"),
)
FLAGS: tuple[Flag, ...] = (
    *(*MODEL, *DEVICE, *CACHE, *SCHEDULER, *BUCKETS),
    *(*EXECUTION, *WARMUP, *DIAGNOSTICS, *EMULATOR),
    *(*SERVER, *TEXT, *LOGS),
)

FILE_FLAGS: Mapping[str, str] = {
    "config": "YAML file with any of these settings; flags and variables win over it",
    "api-key-file": "File with one key a line, beside those of --api-key",
}
"""Settings that name a file to read; they have no field of their own."""

ACCEPTED: Mapping[str, tuple[str, str]] = {
    "tensor-parallel-size": ("1", "one device runs the model in this version"),
    "pipeline-parallel-size": ("1", "one device runs the model in this version"),
    "data-parallel-size": ("1", "one engine runs in this version"),
    "enable-chunked-prefill": ("true", "long prompts are always computed in chunks"),
    "use-padding-aware-scheduling": (
        "true",
        "prompts are always merged by the cost of their padded launch, which stays within "
        "max-num-batched-tokens",
    ),
    "num-scheduler-steps": ("1", "each step is planned by itself, one ahead of the device"),
    "disable-log-stats": ("true", "there is no periodic line to switch on; see /metrics"),
    "trust-remote-code": ("false", "code that lies in a checkpoint is never run"),
}
"""Flags of other servers' start scripts: the one value that is true here, and why."""

ABSENT = frozenset(
    (
        *("enable-lora", "lora-modules", "max-loras", "max-lora-rank"),
        *("kv-cache-dtype", "speculative-config", "swap-space", "cpu-offload-gb"),
        *("tokenizer", "tokenizer-mode", "load-format", "download-dir", "hf-overrides"),
        *("ssl-keyfile", "ssl-certfile", "root-path"),
    )
)
"""Flags that people bring along from vLLM: the nearest of ours would be a wrong hint."""
