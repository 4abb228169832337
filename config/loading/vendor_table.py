"""What is known of each setting of vLLM for Gaudi but those of its buckets: name, default there,
meaning, and why we have none where no flag of ours reads it. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass

NOT_BUILT, NOT_NEEDED = "not built", "not needed"


@dataclass(frozen=True, slots=True)
class Knob:
    """One variable. `word` and `why` are empty where a flag of ours reads it."""

    variable: str
    """A trailing * stands for any ending."""
    default: str
    """Over there, as it is written there."""
    meaning: str
    word: str = ""
    """not built or not needed."""
    why: str = ""

    @property
    def reason(self) -> str:
        """not needed: why."""
        return f"{self.word}: {self.why}"


_FP8 = "quantised weights and caches are not in this version"
_MOE = "mixtures of experts are not in this version"
_HYBRID = "models with a recurrent state are not in this version"
_IMAGES = "images are not in this version"
_APART = "prefill and decode run in one engine in this version"
_SLICES = "a long prompt is computed in chunks of max-num-batched-tokens instead"

GROUPS: Mapping[str, tuple[Knob, ...]] = {
    "Execution": (
        Knob("VLLM_T_COMPILE_REGIONAL_COMPILATION", "true", "compile layer by layer"),
        Knob("VLLM_T_COMPILE_FULLGRAPH", "false", "a graph break is an error"),
        Knob(
            "VLLM_T_COMPILE_DYNAMIC_SHAPES",
            "true (its documentation: false)",
            "recipes for symbolic shapes",
        ),
        Knob("VLLM_CONFIG_HIDDEN_LAYERS", "1", "lazy modes: decoder layers in one recipe"),
        Knob("VLLM_PROMPT_USE_FUSEDSDPA", "auto", "prompts through the fused attention"),
        Knob(
            "VLLM_PROMPT_USE_FLEX_ATTENTION",
            "false",
            "prompts of Llama through flex attention",
            NOT_BUILT,
            "prompts take the fused attention, or the plain one",
        ),
        Knob(
            "VLLM_CONTIGUOUS_PA",
            "auto",
            "decodes read the cache as one slice; on where prefix caching is off, and asking for "
            "it switches that off",
        ),
        Knob(
            "VLLM_DEFRAG_THRESHOLD",
            "32",
            "unused blocks below the highest one in use before blocks are moved",
        ),
        Knob(
            "VLLM_DEFRAG_WITH_GRAPHS",
            "auto",
            "move blocks in a captured graph",
            NOT_NEEDED,
            "blocks move between launches, in shapes that warm-up has met",
        ),
        Knob(
            "VLLM_COS_SIN_RECOMPUTE",
            "false",
            "rotary tables computed in each launch",
            NOT_NEEDED,
            "they are computed once, for the whole context",
        ),
        Knob(
            "VLLM_ROW_PARALLEL_CHUNKS",
            "1",
            "parts of a launch, whose sums over the cards overlap",
            NOT_BUILT,
            "one card runs the model in this version",
        ),
        Knob(
            "VLLM_ROW_PARALLEL_CHUNK_THRESHOLD",
            "8192",
            "tokens from which on a launch is parted",
            NOT_BUILT,
            "one card runs the model in this version",
        ),
        Knob(
            "VLLM_HPU_FSDPA_SLICE_ENABLED",
            "true with padding-aware buckets",
            "attention of long prompts in slices",
            NOT_BUILT,
            _SLICES,
        ),
        Knob(
            "VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD",
            "min(budget, 8192)",
            "tokens from which on it is sliced",
            NOT_BUILT,
            _SLICES,
        ),
        Knob(
            "VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE",
            "half of that, a multiple of 1024",
            "tokens of a slice",
            NOT_BUILT,
            _SLICES,
        ),
        Knob(
            "VLLM_HPU_FSDPA_SLICE_WITH_GRAPH_BREAKS",
            "lazy only",
            "a recipe for each slice",
            NOT_BUILT,
            _SLICES,
        ),
        Knob(
            "VLLM_FUSEDSDPA_SLIDE_THLD",
            "8192",
            "tokens from which on query buckets are multiples of a slice",
            NOT_BUILT,
            _SLICES,
        ),
        Knob(
            "VLLM_HPU_FORCE_MARK_STEP",
            "fork only",
            "end a recipe after each step",
            NOT_NEEDED,
            "recipes end where a launch does",
        ),
        Knob(
            "VLLM_USE_FAKE_HPU",
            "unset",
            "mocks in place of the card, for tests",
            NOT_NEEDED,
            "`--device hpu-emulator` imitates a card, with what it counts and refuses",
        ),
    ),
    "Scheduling and sampling": (
        Knob(
            "VLLM_DELAYED_SAMPLING",
            "fork only",
            "read the tokens of a step after the next one has begun: our two steps in flight",
        ),
        Knob(
            "VLLM_MERGED_PREFILL",
            "false",
            "prompts behind each other in one row",
            NOT_BUILT,
            "prompts are merged as rows of a batch, see --max-prefill-batch",
        ),
        Knob(
            "VLLM_HANDLE_TOPK_DUPLICATES",
            "false",
            "keep all tokens that tie with the k-th",
            NOT_NEEDED,
            "they are always kept",
        ),
        Knob(
            "VLLM_RPC_TIMEOUT",
            "10000",
            "milliseconds to wait for the engine",
            NOT_NEEDED,
            "a dead engine is noticed at once, a working one is waited for",
        ),
        Knob(
            "VLLM_ENGINE_ITERATION_TIMEOUT_S",
            "60",
            "seconds that a step may take",
            NOT_NEEDED,
            "a step that compiles is waited for, a dead worker is noticed at once",
        ),
        Knob(
            "VLLM_WORKER_MULTIPROC_METHOD",
            "spawn, forced",
            "how workers are started",
            NOT_NEEDED,
            "every worker is a process started anew",
        ),
        Knob(
            "VLLM_GC_THR_*",
            "fork only",
            "thresholds of Python's garbage collector",
            NOT_NEEDED,
            "what lives at start is taken out of its sight",
        ),
    ),
    "Memory and warm-up": (
        Knob("VLLM_SKIP_WARMUP", "false", "no warm-up; over there in developer mode only"),
        Knob(
            "VLLM_DEVELOPER_MODE",
            "false",
            "allow unsafe switches",
            NOT_NEEDED,
            "no switch is locked behind another",
        ),
        Knob(
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
            "false",
            "a context longer than the checkpoint was made for; asked for by the guide's page on "
            "long context",
            NOT_NEEDED,
            "up to the checkpoint's own length none is asked for, and longer ones are refused",
        ),
        Knob("VLLM_FULL_WARMUP", "false", "torch.compile: check no guard after warm-up"),
        Knob("VLLM_GRAPH_RESERVED_MEM", "0.1", "share of the usable memory for graphs"),
        Knob("VLLM_GRAPH_PROMPT_RATIO", "0.3 (fork only)", "share of that for prompts"),
        Knob("VLLM_GRAPH_PROMPT_STRATEGY", "min_tokens (fork only)", "prompts captured first"),
        Knob("VLLM_GRAPH_DECODE_STRATEGY", "max_bs (fork only)", "decodes captured first"),
        Knob(
            "VLLM_WEIGHT_LOAD_FORCE_SYNC",
            "true",
            "wait for each layer's copy to the card",
            NOT_NEEDED,
            "weights are read and copied tensor by tensor",
        ),
    ),
    "Diagnostics": (
        Knob("VLLM_HPU_LOG_STEP_GRAPH_COMPILATION", "false", "log steps that compiled"),
        Knob("VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL", "false", "log every step's compilations"),
        Knob("VLLM_HPU_LOG_STEP_CPU_FALLBACKS", "false", "log steps with work on the host"),
        Knob("VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL", "false", "log that of every step"),
        Knob("VLLM_PROFILER_ENABLED", "false", "a trace of steps; `full` is read as true"),
        Knob("VLLM_PROFILE_STEPS", "unset", "first and last step of a trace"),
        Knob(
            "VLLM_PROFILE_PROMPT",
            "unset",
            "profile one made-up prompt of bs,seq[,ctx]",
            NOT_BUILT,
            "a trace holds real steps",
        ),
        Knob(
            "VLLM_PROFILE_DECODE",
            "unset",
            "profile one made-up decode of bs,seq",
            NOT_BUILT,
            "a trace holds real steps",
        ),
        Knob(
            "VLLM_PT_PROFILE",
            "unset (legacy)",
            "the same in one word",
            NOT_BUILT,
            "a trace holds real steps",
        ),
        Knob(
            "VLLM_DEBUG",
            "unset",
            "log steps, moved blocks or forward passes",
            NOT_BUILT,
            "the trace and the step logs show steps; --log-level debug the rest",
        ),
    ),
    "Quantisation": (
        Knob("QUANT_CONFIG", "unset", "file that says how to measure or quantise", NOT_BUILT, _FP8),
        Knob("VLLM_HPU_FORCE_CHANNEL_FP8", "true", "FP8 by blocks to channels", NOT_BUILT, _FP8),
        Knob("VLLM_SCALE_ADJUSTMENT", "true", "FP8 range of Gaudi 2", NOT_BUILT, _FP8),
        Knob("VLLM_HPU_CONVERT_TO_FP8UZ", "older name", "the same", NOT_BUILT, _FP8),
        Knob("VLLM_DYNAMIC_KV_QUANT", "false", "FP8 cache, scaled as it goes", NOT_BUILT, _FP8),
        Knob("HPU_ALIGNED_SCALE", "false", "scales the hardware has", NOT_BUILT, _FP8),
        Knob(
            "VLLM_DISABLE_MARK_SCALES_AS_CONST",
            "false",
            "keep scales out of the recipes",
            NOT_BUILT,
            _FP8,
        ),
    ),
    "Models": (
        Knob("VLLM_MOE_CHUNK", "unset", "experts computed in slices", NOT_BUILT, _MOE),
        Knob("VLLM_MOE_TOKEN_BOUNDARY", "unset", "tokens from which on", NOT_BUILT, _MOE),
        Knob("MAX_EXPERTS_PER_SLICE", "unset", "experts of a slice", NOT_BUILT, _MOE),
        Knob("VLLM_USE_HYBRID_CACHE", "by model", "one cache for both states", NOT_BUILT, _HYBRID),
        Knob("VLLM_COMPACT_GDN", "by model", "compact recurrent state", NOT_BUILT, _HYBRID),
        Knob(
            "VLLM_USE_NAIVE_MAMBA_CACHE_SHARING",
            "by model",
            "how recurrent states are shared",
            NOT_BUILT,
            _HYBRID,
        ),
        Knob("VLLM_MULTIMODAL_BUCKETS", "by model", "buckets of images", NOT_BUILT, _IMAGES),
        Knob("VLLM_MULTIMODAL_RESOLUTIONS", "none", "image sizes to warm", NOT_BUILT, _IMAGES),
        Knob(
            "VLLM_MM_WARMUP_OUTSIDE_COMPILE_ONLY",
            "false",
            "warm images with real launches",
            NOT_BUILT,
            _IMAGES,
        ),
        Knob(
            "VLLM_HPU_MULTI_MODEL_CONFIG",
            "unset",
            "models that one server swaps",
            NOT_BUILT,
            "one server serves one model",
        ),
        Knob(
            "VLLM_HPU_HETERO_KV_LAYOUT",
            "false (unset reads as true)",
            "cache layout of another device",
            NOT_BUILT,
            _APART,
        ),
        Knob("VLLM_HPU_NIXL_JOINT_KV", "false", "cache staged for a GPU", NOT_BUILT, _APART),
        Knob("VLLM_HPU_NIXL_STAGING_SLOTS", "0", "places of that", NOT_BUILT, _APART),
    ),
}
