"""Settings of HPU execution: execution mode, warm-up, diagnostics and the emulated card."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from config.errors import ConfigError
from config.setting import Setting, check_settings, is_count, setting, settings_of

HPU_GRAPHS, TORCH_COMPILE, EAGER, LAZY = "hpu-graphs", "torch-compile", "eager", "lazy"
SLICE_MULTIPLE = 1024
"""Fused attention is known to work with slice sizes that are multiples of this number
(_setup_slicing in vllm_gaudi/extension/utils.py of vllm-project/vllm-gaudi)."""

LAST_LAZY_RELEASE = (1, 23)
"""Newest release whose default here is lazy mode, which HPU graphs need. vllm-gaudi tested lazy
mode up to this release, and removed it from its tests in 0.21, which targets 1.24. The
vendor's bridge defaults to eager mode, and calls lazy mode legacy."""
RUNTIME_DISTRIBUTION = "habana-torch-plugin"
"""Package whose version is the release of the vendor's runtime."""
EMULATED_RELEASE = "1.22.1"
"""Release of the emulated card."""

FAST_SOFTMAX, FP32_SOFTMAX = "fast", "fp32"

CAPTURE_ORDERS = ("traffic", "min_tokens", "max_bs")
"""Capture orders: by frequency in the traffic, by tokens, or by batch size."""

SIDE_COPIES, DEFAULT_COPIES, BLOCKING_COPIES = "side", "default", "blocking"

PACKED_EXPERTS_FLAG = "native-mxfp4"
"""Name of the flag that keeps MXFP4 experts packed on the card."""

READ_EVERYWHERE = ("contiguous_pa", "defrag_threshold")
"""Fields of ExecutionConfig that every device reads, besides the group Diagnostics."""


def _flag_of(name: str, facts: Setting, value: object) -> str:
    return f"--{'no-' if value is False else ''}{facts.name or name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """Settings of the execution of launches, and of their diagnostics."""

    mode: str = setting(
        "auto",
        "Execution mode; auto: by PT_HPU_LAZY_MODE and --enforce-eager, else hpu-graphs "
        "(the vendor's torch up to release 1.23) or torch-compile",
        name="execution-mode",
        choices=("auto", HPU_GRAPHS, TORCH_COMPILE, EAGER, LAZY),
    )
    regional_compilation: bool = setting(
        True,
        "torch-compile: compile layer by layer",
        variables=("VLLM_T_COMPILE_REGIONAL_COMPILATION",),
    )
    compile_fullgraph: bool = setting(
        False, "torch-compile: a graph break is an error", variables=("VLLM_T_COMPILE_FULLGRAPH",)
    )
    compile_dynamic_shapes: bool = setting(
        False,
        "torch-compile: symbolic shapes",
        variables=("VLLM_T_COMPILE_DYNAMIC_SHAPES",),
    )
    layers_per_recipe: int = setting(
        1,
        "Lazy modes: decoder layers per recipe",
        name="config-hidden-layers",
        variables=("VLLM_CONFIG_HIDDEN_LAYERS",),
        minimum=1,
    )
    fused_sdpa: bool = setting(
        True,
        "Use the vendor's fused attention for prompts",
        name="prompt-use-fusedsdpa",
        variables=("VLLM_PROMPT_USE_FUSEDSDPA",),
    )
    flex_attention: bool = setting(
        False,
        "Use PyTorch's flex attention for prompts without cached context, windows and "
        "soft caps; not in lazy modes",
        name="prompt-use-flex-attention",
        variables=("VLLM_PROMPT_USE_FLEX_ATTENTION",),
    )
    softmax: str = setting(
        "auto",
        "Softmax of attention; fp32: in float32; auto: fp32 for Qwen2 and float16, else fast",
        name="softmax-mode",
        choices=("auto", FAST_SOFTMAX, FP32_SOFTMAX),
        switches={"fp32-softmax": (FP32_SOFTMAX, FAST_SOFTMAX)},
        switch_variables=dict.fromkeys(
            ("VLLM_FP32_SOFTMAX", "VLLM_USE_FP32_SOFTMAX"), "fp32-softmax"
        ),
    )
    block_softmax: str = setting(
        "auto",
        "Subtracted from scores in decodes: the maximum of a sequence (index_reduce, "
        "scatter_reduce), of all sequences (amax) or of a head (head_amax), or means of "
        "block maxima (wsum, wsum_head_amax); amax and head_amax lose sequences with "
        "far lower scores; auto: the vendor's kernel, else index_reduce",
        variables=("VLLM_PA_SOFTMAX_IMPL",),
        choices=(
            *("auto", "index_reduce", "scatter_reduce"),
            *("amax", "head_amax", "wsum", "wsum_head_amax"),
        ),
        spellings={"wsum,head_amax": "wsum_head_amax"},
    )
    sdpa_slicing: bool = setting(
        True,
        "Run fused attention over a long cached context in slices",
        name="fsdpa-slicing",
        variables=("VLLM_HPU_FSDPA_SLICE_ENABLED",),
    )
    sdpa_slice_threshold: int = setting(
        8192,
        "Minimum cached and new tokens for slices",
        name="fsdpa-slice-threshold",
        variables=("VLLM_HPU_FSDPA_SLICE_SEQ_LEN_THLD",),
        minimum=SLICE_MULTIPLE,
    )
    sdpa_slice_size: int | None = setting(
        None,
        "Tokens of a slice, rounded up to a multiple of 1024; auto: half the threshold",
        name="fsdpa-slice-size",
        variables=("VLLM_HPU_FSDPA_SLICE_CHUNK_SIZE",),
        minimum=1,
    )
    contiguous_pa: bool | None = setting(
        None,
        "Read the KV cache in decodes as one slice; auto: where faster, without prefix caching",
        variables=("VLLM_CONTIGUOUS_PA",),
    )
    defrag_threshold: int = setting(
        32,
        "With contiguous-pa: unused blocks below the highest used block before blocks "
        "are moved down",
        variables=("VLLM_DEFRAG_THRESHOLD",),
        minimum=1,
    )
    host_copies: str = setting(
        "auto",
        "How results leave the card: on their own stream (side), on the launches' "
        "stream (default), or after all work (blocking); auto: the first that works",
        choices=("auto", SIDE_COPIES, DEFAULT_COPIES, BLOCKING_COPIES),
    )
    split_qkv: bool = setting(
        False, "Compute queries, keys and values in three matrix multiplications"
    )
    force_channel_fp8: bool = setting(
        True,
        "Convert FP8 block scales to output scales while loading; off: expand weights "
        "to bfloat16 in launches",
        variables=("VLLM_HPU_FORCE_CHANNEL_FP8",),
    )
    convert_to_fp8uz: bool = setting(
        True,
        "Gaudi 2: halve FP8 weights and double their scales while loading; off: for "
        "converted checkpoints",
        variables=("VLLM_SCALE_ADJUSTMENT", "VLLM_HPU_CONVERT_TO_FP8UZ"),
    )
    disable_mark_scales_as_const: bool = setting(
        False,
        "With --quantization inc, pass scales as inputs, not as constants",
        variables=("VLLM_DISABLE_MARK_SCALES_AS_CONST",),
    )
    quantized_kernels: bool = setting(
        True,
        "Run FP8 and 4-bit weights on the vendor's operators; off: convert them while loading",
    )
    native_mxfp4: bool = setting(
        False,
        "Keep MXFP4 experts with biases (gpt-oss) on the card, if the release can",
        variables=("HPU_MXFP4_NATIVE",),
    )
    selftest: str = setting(
        "auto",
        "Turn off features that failed in `gaudiserve selftest`; without a result, run "
        "its quick checks at the first start; auto: on a card",
        choices=("auto", "on", "off"),
    )
    fused_experts: bool = setting(
        True, "Use the vendor's operator for routed experts; off: plain operations"
    )
    fused_block_softmax: bool = setting(
        True,
        "Use the vendor's kernel for block weights in decodes, if present",
        variables=("VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT",),
    )
    fused_norm_rope: bool = setting(True, "Use the vendor's kernels for norms and rotary embedding")
    log_graph_compilation: bool = setting(
        False,
        "Log each step that compiled, with its shapes",
        group="Diagnostics",
        name="log-step-graph-compilation",
        variables=("VLLM_HPU_LOG_STEP_GRAPH_COMPILATION",),
    )
    log_graph_compilation_all: bool = setting(
        False,
        "Log the compilations of every step",
        group="Diagnostics",
        name="log-step-graph-compilation-all",
        variables=("VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL",),
    )
    log_cpu_fallbacks: bool = setting(
        False,
        "Log each step with operations on the host, and their names",
        group="Diagnostics",
        name="log-step-cpu-fallbacks",
        variables=("VLLM_HPU_LOG_STEP_CPU_FALLBACKS",),
    )
    log_cpu_fallbacks_all: bool = setting(
        False,
        "Log the number of operations on the host in every step",
        group="Diagnostics",
        name="log-step-cpu-fallbacks-all",
        variables=("VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL",),
    )
    profiler: str | None = setting(
        None,
        "File for a Chrome trace of the steps; auto: in the cache folder",
        metavar="FILE",
        group="Diagnostics",
        name="profiler-trace",
        switches={"profiler": ("auto", None)},
        switch_variables={"VLLM_PROFILER_ENABLED": "profiler"},
        spellings={"full": "true"},
    )
    profiler_steps: str | None = setting(
        None,
        "FIRST,LAST or LAST: steps to trace, counted from 0",
        group="Diagnostics",
        variables=("VLLM_PROFILE_STEPS",),
    )
    profile_prompt: str | None = setting(
        None,
        "BATCH,TOKENS or BATCH,TOKENS,BLOCKS (cached context of each): profile a "
        "prefill into a file, and exit",
        group="Diagnostics",
        variables=("VLLM_PROFILE_PROMPT",),
    )
    profile_decode: str | None = setting(
        None,
        "BATCH,BLOCKS (of all sequences): profile a decode into a file, and exit",
        group="Diagnostics",
        variables=("VLLM_PROFILE_DECODE",),
    )

    def __post_init__(self) -> None:
        check_settings(self)
        first, last = self.profiled_steps
        if last is not None and first > last:
            raise ConfigError(
                f"profiler_steps has the first step {first}, it must be at most the last step, "
                f"{last}"
            )
        sizes = self.slice_sizes
        if sizes is not None and sizes[1] > sizes[0]:
            raise ConfigError(
                f"--fsdpa-slice-size is {sizes[1]}, it must not be above --fsdpa-slice-threshold, "
                f"{sizes[0]}"
            )
        _ = self.profiled_prompt, self.profiled_decode

    @property
    def changed_on_gaudi(self) -> list[str]:
        """Flags that only a Gaudi reads and whose values are not the defaults."""
        plain = ExecutionConfig()
        return [
            _flag_of(name, facts, getattr(self, name))
            for name, facts in settings_of(self).items()
            if not facts.group and name not in READ_EVERYWHERE
            if getattr(self, name) != getattr(plain, name)
        ]

    def unread_in(self, mode: str, *, uses_compressor: bool) -> list[tuple[str, str]]:
        """(flag, reason) of each setting that was changed and that execution mode `mode` or
        another setting leaves without effect on a Gaudi. `uses_compressor`: layers are quantized by
        Intel Neural Compressor."""
        compiles, slices = mode == TORCH_COMPILE, bool(self.slice_sizes)
        needs_compile = f"it needs --execution-mode {TORCH_COMPILE}, the mode is {mode}"
        needs_slices = (
            "it needs --fsdpa-slicing and --prompt-use-fusedsdpa without "
            "--prompt-use-flex-attention"
        )
        rules = {
            "regional_compilation": (compiles, needs_compile),
            "compile_fullgraph": (compiles, needs_compile),
            "compile_dynamic_shapes": (compiles, needs_compile),
            "layers_per_recipe": (
                mode in (HPU_GRAPHS, LAZY),
                f"it needs --execution-mode {HPU_GRAPHS} or {LAZY}, the mode is {mode}",
            ),
            "sdpa_slice_threshold": (slices, needs_slices),
            "sdpa_slice_size": (slices, needs_slices),
            "disable_mark_scales_as_const": (uses_compressor, "it needs --quantization inc"),
        }
        changed = self.changed_on_gaudi
        flags = {
            name: _flag_of(name, facts, getattr(self, name))
            for name, facts in settings_of(self).items()
        }
        return [
            (flags[name], why)
            for name, (is_read, why) in rules.items()
            if not is_read and flags[name] in changed
        ]

    @property
    def packs_experts(self) -> bool:
        """Whether MXFP4 experts stay packed on a card if the backend can run packed experts."""
        return self.native_mxfp4

    @property
    def slice_sizes(self) -> tuple[int, int] | None:
        """(threshold, tokens per slice) of sliced attention; None: attention is never sliced."""
        if not (self.sdpa_slicing and self.fused_sdpa) or self.flex_attention:
            return None
        size = self.sdpa_slice_size or self.sdpa_slice_threshold // 2
        return self.sdpa_slice_threshold, -(-size // SLICE_MULTIPLE) * SLICE_MULTIPLE

    @property
    def profiled_steps(self) -> tuple[int, int | None]:
        """(first, last) traced step; last is None if the trace has no end. Raises ConfigError."""
        if self.profiler_steps is None:
            return 0, None
        words = self.profiler_steps.split(",")
        if len(words) > 2 or not all(is_count(word) for word in words):
            raise ConfigError(
                f"profiler_steps is {self.profiler_steps!r}, it must be FIRST,LAST or LAST"
            )
        return (int(words[0]) if len(words) == 2 else 0), int(words[-1])

    @property
    def profiled_prompt(self) -> tuple[int, int, int] | None:
        """(batch, query, blocks) of `profile_prompt`; None if it is not set. Raises ConfigError."""
        if self.profile_prompt is None:
            return None
        batch, query, *blocks = _numbers(
            "profile_prompt", self.profile_prompt, "BATCH,TOKENS", "BATCH,TOKENS,BLOCKS"
        )
        return batch, query, blocks[0] if blocks else 0

    @property
    def profiled_decode(self) -> tuple[int, int, int] | None:
        """(batch, 1, blocks) of `profile_decode`; None if it is not set. Raises ConfigError."""
        if self.profile_decode is None:
            return None
        batch, blocks = _numbers("profile_decode", self.profile_decode, "BATCH,BLOCKS")
        return batch, 1, blocks


def _numbers(name: str, text: str, *forms: str) -> list[int]:
    words = text.split(",")
    counts = [form.count(",") + 1 for form in forms]
    if len(words) not in counts or not all(is_count(word) for word in words):
        raise ConfigError(f"{name} is {text!r}, it must be {' or '.join(forms)}")
    return [int(word) for word in words]


@dataclass(frozen=True, slots=True)
class WarmupConfig:
    """Settings of the warm-up: which buckets are compiled and captured, and when."""

    mode: str = setting(
        "full",
        "Buckets that run before the first request: all (full), all, but only compiled "
        "and captured (compile), the most useful (background, others later), or none "
        "(skip)",
        name="warmup",
        choices=("full", "compile", "background", "skip"),
        switches={"skip-warmup": ("skip", "full")},
        switch_variables={"VLLM_SKIP_WARMUP": "skip-warmup"},
    )
    compile_only: bool = setting(
        True,
        "Compile all buckets before they run (PT_COMPILE_ONLY_MODE), where the runtime can",
        name="compile-only-warmup",
    )
    traffic: str | None = setting(
        None,
        "Lengths of real requests, whose buckets are prepared first; none: --bucketing-traffic",
        metavar="FILE",
        name="warmup-traffic",
    )
    full_guards_off: bool = setting(
        False,
        "torch-compile: skip guard checks after warm-up; a new shape is an error",
        name="full-warmup",
        variables=("VLLM_FULL_WARMUP",),
    )
    on_unwarmed_shape: str = setting(
        "run",
        "For a new shape: compile it (run), pad it to a prepared shape (pad), or reject "
        "its requests (reject)",
        choices=("run", "pad", "reject"),
    )
    graph_memory_fraction: float = setting(
        0.1,
        "Fraction of usable memory for captured graphs",
        name="graph-reserved-mem",
        variables=("VLLM_GRAPH_RESERVED_MEM",),
        minimum=0,
        maximum=1,
    )
    graph_prompt_ratio: float = setting(
        0.3,
        "Fraction of graph memory for prompts",
        variables=("VLLM_GRAPH_PROMPT_RATIO",),
        minimum=0,
        maximum=1,
    )
    prompt_order: str = setting(
        "traffic",
        "Buckets captured first: the most used (traffic), or in the order of vllm-gaudi "
        "(min_tokens, max_bs)",
        name="graph-prompt-strategy",
        variables=("VLLM_GRAPH_PROMPT_STRATEGY",),
        choices=CAPTURE_ORDERS,
    )
    decode_order: str = setting(
        "traffic",
        "Buckets captured first: the most used (traffic), or in the order of vllm-gaudi "
        "(min_tokens, max_bs)",
        name="graph-decode-strategy",
        variables=("VLLM_GRAPH_DECODE_STRATEGY",),
        choices=CAPTURE_ORDERS,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.mode == "compile" and not self.compile_only:
            raise ConfigError(
                "--warmup is compile and --compile-only-warmup is off: turn it on, or use --warmup "
                "full"
            )


@dataclass(frozen=True, slots=True)
class EmulatorSettings:
    """Settings of --device hpu-emulator: the emulated card, its delays and faults, and the handling
    of misuse."""

    card: str = setting(
        "gaudi2", "Emulated card", name="emulator-card", choices=("gaudi2", "gaudi3")
    )
    memory_bytes: int = setting(
        4 << 30,
        "Memory of the emulated card, on the host",
        name="emulator-memory",
        minimum=1 << 20,
    )
    compile_delay_s: float = setting(
        0.0, "Seconds that each compilation takes", name="emulator-compile-delay", minimum=0
    )
    late_copy_s: float = setting(
        0.0005,
        "Maximum seconds between the event of a copy and its bytes on the host",
        name="emulator-late-copy",
        minimum=0,
    )
    is_strict: bool = setting(
        False,
        "Stop the worker at misuse of the device",
        name="emulator-strict",
    )
    faults: tuple[str, ...] = setting(
        (),
        "Checks of `gaudiserve selftest` that fail",
        name="emulator-faults",
    )

    def __post_init__(self) -> None:
        check_settings(self)


class ModeChoice(NamedTuple):
    """An execution mode and the reason for it."""

    mode: str
    reason: str

    @property
    def is_lazy(self) -> bool:
        """Whether PT_HPU_LAZY_MODE must be 1 before the runtime's first import."""
        return self.mode in (HPU_GRAPHS, LAZY)


def is_vendor_torch(version: str) -> bool:
    """Whether this version of torch looks like a build of Habana: 2.6.0+hpu_1.21.3-57.gitabf798b,
    2.9.0+hpu.1.23.0.695, or 2.10.0a0+gitc1e5ed4. Habana's bridge accepts the same local parts."""
    return version.partition("+")[2].startswith(("git", "hpu"))


def choose_mode(
    requested: str,
    *,
    enforce_eager: bool,
    lazy_variable: str | None,
    has_vendor_torch: bool,
    release: str,
) -> ModeChoice:
    """The execution mode. Raises ConfigError. The table is the vendor's and applies if `requested`
    is "auto".

    `lazy_variable`: value of PT_HPU_LAZY_MODE; None: not set, then 1 with the vendor's torch up to
    LAST_LAZY_RELEASE, else 0. The runtime's Python code takes anything except the string 0 for lazy
    mode, but its library reads a number and compares it with 0 and 1 (the bridge's env_flags.cpp).
    `has_vendor_torch`: whether torch is the vendor's build, which lazy mode and HPU graphs need.
    `release`: version of the runtime; empty if unknown.

        PT_HPU_LAZY_MODE  enforce_eager  mode
        0                 no             torch-compile
        0                 yes            eager
        1                 no             hpu-graphs
        1                 yes            lazy
    """
    if lazy_variable not in (None, "0", "1"):
        raise ConfigError(f"PT_HPU_LAZY_MODE is {lazy_variable!r}, it must be 0 or 1")
    wants_lazy = None if lazy_variable is None else lazy_variable == "1"
    if requested == "auto":
        is_lazy, reason = wants_lazy, f"PT_HPU_LAZY_MODE is {lazy_variable}"
        if is_lazy is None:
            is_lazy, reason = _defaults_to_lazy(has_vendor_torch, release)
        if enforce_eager:
            choice = ModeChoice(LAZY if is_lazy else EAGER, f"{reason}, eager mode is enforced")
        else:
            choice = ModeChoice(HPU_GRAPHS if is_lazy else TORCH_COMPILE, reason)
    else:
        choice = ModeChoice(requested, f"--execution-mode {requested}")
        if enforce_eager and requested in (HPU_GRAPHS, TORCH_COMPILE):
            raise ConfigError(
                f"--execution-mode is {requested!r} and --enforce-eager is on: turn one of them off"
            )
        if wants_lazy is not None and wants_lazy != choice.is_lazy:
            raise ConfigError(
                f"--execution-mode is {requested!r} and PT_HPU_LAZY_MODE is {lazy_variable!r}: "
                f"this mode needs {int(choice.is_lazy)}"
            )
    if choice.is_lazy and not has_vendor_torch:
        raise ConfigError(
            f"execution mode {choice.mode!r} ({choice.reason}) needs the vendor's build of torch, "
            "which is not installed here: use --execution-mode torch-compile, and unset "
            "PT_HPU_LAZY_MODE"
        )
    return choice


def _defaults_to_lazy(has_vendor_torch: bool, release: str) -> tuple[bool, str]:
    """(whether the default mode is lazy, reason)."""
    if not has_vendor_torch:
        return False, "HPU graphs need the vendor's build of torch, which is not installed here"
    found = re.match(r"(\d+)\.(\d+)", release)
    last = ".".join(map(str, LAST_LAZY_RELEASE))
    if not found:
        return False, f"the release is unknown, HPU graphs are the default up to {last}"
    if (int(found[1]), int(found[2])) > LAST_LAZY_RELEASE:
        return False, f"the release is {release}, HPU graphs are the default up to {last}"
    return True, f"torch is the vendor's build, of release {release}"
