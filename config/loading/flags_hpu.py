"""The settings of a compiling device: execution, warm-up, diagnostics, and the emulated card."""

from config.execution import CAPTURE_ORDERS, CARDS, MODES, ON_UNWARMED, WARMUPS
from config.loading.flag import Flag

EXECUTION = (
    Flag(
        "execution",
        "mode",
        "Execution on HPU",
        "How the device is driven; auto: captured HPU graphs with the vendor's torch, else "
        "torch-compile",
        name="execution-mode",
        choices=MODES,
    ),
    Flag(
        "execution",
        "regional_compilation",
        "Execution on HPU",
        "torch-compile: compile layer by layer, not the whole model",
        variables=("VLLM_T_COMPILE_REGIONAL_COMPILATION",),
    ),
    Flag(
        "execution",
        "compile_fullgraph",
        "Execution on HPU",
        "torch-compile: a graph break is an error",
        variables=("VLLM_T_COMPILE_FULLGRAPH",),
    ),
    Flag(
        "execution",
        "compile_dynamic_shapes",
        "Execution on HPU",
        "torch-compile: compile for symbolic shapes",
        variables=("VLLM_T_COMPILE_DYNAMIC_SHAPES",),
    ),
    Flag(
        "execution",
        "hidden_layers",
        "Execution on HPU",
        "Lazy modes: decoder layers in one recipe",
        name="config-hidden-layers",
        variables=("VLLM_CONFIG_HIDDEN_LAYERS",),
    ),
    Flag(
        "execution",
        "fused_sdpa",
        "Execution on HPU",
        "Prompts through the vendor's fused attention",
        name="prompt-use-fusedsdpa",
        variables=("VLLM_PROMPT_USE_FUSEDSDPA",),
    ),
    Flag(
        "execution",
        "contiguous_pa",
        "Execution on HPU",
        "Decodes read the cache as one slice, not block by block; auto: where the device gains by "
        "it and prefix caching is off",
        variables=("VLLM_CONTIGUOUS_PA",),
    ),
    Flag(
        "execution",
        "defrag_threshold",
        "Execution on HPU",
        "Where decodes read a slice: blocks that may lie unused in it before others move down",
        variables=("VLLM_DEFRAG_THRESHOLD",),
    ),
    Flag(
        "execution",
        "split_qkv",
        "Execution on HPU",
        "Queries, keys and values as three products instead of one",
    ),
)
WARMUP = (
    Flag(
        "warmup",
        "mode",
        "Warm-up",
        "full: every bucket before the first request; background: ready early, the rest between "
        "requests; skip: none",
        name="warmup",
        choices=WARMUPS,
        switches={"skip-warmup": ("skip", "full")},
        variables_of_switches={"VLLM_SKIP_WARMUP": "skip-warmup"},
    ),
    Flag(
        "warmup",
        "traffic",
        "Warm-up",
        "background: file with lengths of real requests; their buckets come first",
        name="warmup-traffic",
    ),
    Flag(
        "warmup",
        "full_guards_off",
        "Warm-up",
        "torch-compile: check no guard after warm-up; a shape that is not warm is an error",
        name="full-warmup",
        variables=("VLLM_FULL_WARMUP",),
    ),
    Flag(
        "warmup",
        "on_unwarmed_shape",
        "Warm-up",
        "A launch whose shape is not prepared: run it, pad it to a prepared one, or reject it",
        choices=ON_UNWARMED,
    ),
    Flag(
        "warmup",
        "graph_reserved_mem",
        "Warm-up",
        "Share of the usable memory that captured graphs may take",
        variables=("VLLM_GRAPH_RESERVED_MEM",),
    ),
    Flag(
        "warmup",
        "graph_prompt_ratio",
        "Warm-up",
        "Share of the graphs' memory for prompts",
        variables=("VLLM_GRAPH_PROMPT_RATIO",),
    ),
    Flag(
        "warmup",
        "prompt_order",
        "Warm-up",
        "Which prompt buckets are captured first",
        name="graph-prompt-strategy",
        variables=("VLLM_GRAPH_PROMPT_STRATEGY",),
        choices=CAPTURE_ORDERS,
    ),
    Flag(
        "warmup",
        "decode_order",
        "Warm-up",
        "Which decode buckets are captured first",
        name="graph-decode-strategy",
        variables=("VLLM_GRAPH_DECODE_STRATEGY",),
        choices=CAPTURE_ORDERS,
    ),
)
DIAGNOSTICS = (
    Flag(
        "execution",
        "log_graph_compilation",
        "Diagnostics",
        "Log each step that compiled, with its shapes",
        name="log-step-graph-compilation",
        variables=("VLLM_HPU_LOG_STEP_GRAPH_COMPILATION",),
    ),
    Flag(
        "execution",
        "log_graph_compilation_all",
        "Diagnostics",
        "Log the number of compilations of every step",
        name="log-step-graph-compilation-all",
        variables=("VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL",),
    ),
    Flag(
        "execution",
        "log_cpu_fallbacks",
        "Diagnostics",
        "Log each step with operations that ran on the host, and which",
        name="log-step-cpu-fallbacks",
        variables=("VLLM_HPU_LOG_STEP_CPU_FALLBACKS",),
    ),
    Flag(
        "execution",
        "log_cpu_fallbacks_all",
        "Diagnostics",
        "Log the number of such operations of every step",
        name="log-step-cpu-fallbacks-all",
        variables=("VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL",),
    ),
    Flag(
        "execution",
        "profiler",
        "Diagnostics",
        "File for a Chrome trace of every step, which Perfetto opens; auto: one in the cache "
        "folder",
        name="profiler-trace",
        switches={"profiler": ("auto", None)},
        variables_of_switches={"VLLM_PROFILER_ENABLED": "profiler"},
        spellings={"full": "true"},
    ),
    Flag(
        "execution",
        "profiler_steps",
        "Diagnostics",
        "FIRST,LAST or LAST: steps that a trace holds, counted from its begin",
        variables=("VLLM_PROFILE_STEPS",),
    ),
)
EMULATOR = (
    Flag(
        "emulator",
        "card",
        "Emulator",
        "The card that is imitated",
        name="emulator-card",
        choices=CARDS,
    ),
    Flag(
        "emulator",
        "memory_bytes",
        "Emulator",
        "Memory of the emulated card, taken from the host's (4G is 4 GiB)",
        name="emulator-memory",
    ),
    Flag(
        "emulator",
        "compile_delay_s",
        "Emulator",
        "Seconds that each compilation takes",
        name="emulator-compile-delay",
    ),
    Flag(
        "emulator",
        "is_strict",
        "Emulator",
        "A misuse of the device ends the worker instead of being counted",
        name="emulator-strict",
    ),
)
