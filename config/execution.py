"""How a compiling device executes: its mode, its warm-up, what it reports, and the emulated card.
Facts, and the one decision that can be made from them alone (`choose_mode`)."""

from dataclasses import dataclass
from typing import NamedTuple

from config.errors import ConfigError

HPU_GRAPHS, TORCH_COMPILE, EAGER, LAZY = "hpu-graphs", "torch-compile", "eager", "lazy"
MODES = ("auto", HPU_GRAPHS, TORCH_COMPILE, EAGER, LAZY)
WARMUPS = ("full", "background", "skip")
ON_UNWARMED = ("run", "pad", "reject")
CAPTURE_ORDERS = ("min_tokens", "max_bs")
CARDS = ("gaudi2", "gaudi3")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}, it must be one of {', '.join(allowed)}")


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value}, it must be between 0 and 1")


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """What happens between a launch and the device. Names in brackets are vLLM's variables."""

    mode: str = "auto"
    """One of MODES: the vendor's table of PT_HPU_LAZY_MODE and enforce_eager, by name."""
    regional_compilation: bool = True
    """torch-compile: layer by layer instead of the whole model
    (VLLM_T_COMPILE_REGIONAL_COMPILATION)."""
    compile_fullgraph: bool = False
    """torch-compile: a graph break is an error (VLLM_T_COMPILE_FULLGRAPH)."""
    compile_dynamic_shapes: bool = False
    """torch-compile: recipes for symbolic shapes (VLLM_T_COMPILE_DYNAMIC_SHAPES)."""
    layers_per_recipe: int = 1
    """Lazy modes: decoder layers in one recipe (VLLM_CONFIG_HIDDEN_LAYERS)."""
    fused_sdpa: bool = True
    """Prompts through the vendor's fused attention (VLLM_PROMPT_USE_FUSEDSDPA)."""
    contiguous_pa: bool | None = None
    """Decodes read the cache as one slice instead of gathering blocks; None: where prefix caching
    is off (VLLM_CONTIGUOUS_PA)."""
    defrag_threshold: int = 32
    """With it, blocks that may lie unused below the highest one in use, before blocks are moved
    down (VLLM_DEFRAG_THRESHOLD)."""
    split_qkv: bool = False
    """Queries, keys and values as three products instead of one."""
    log_graph_compilation: bool = False
    """Log the steps that compiled (VLLM_HPU_LOG_STEP_GRAPH_COMPILATION)."""
    log_graph_compilation_all: bool = False
    """Log every step's count of compilations (VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL)."""
    log_cpu_fallbacks: bool = False
    """Log the steps with ops that ran on the host (VLLM_HPU_LOG_STEP_CPU_FALLBACKS)."""
    log_cpu_fallbacks_all: bool = False
    """Log every step's count of them (VLLM_HPU_LOG_STEP_CPU_FALLBACKS_ALL)."""
    profiler: str | None = None
    """File for a Chrome trace of all steps; auto: one in the cache folder
    (VLLM_PROFILER_ENABLED)."""
    profiler_steps: str | None = None
    """FIRST,LAST or LAST: the steps that a trace holds, counted from 0 when it begins
    (VLLM_PROFILE_STEPS)."""

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, MODES)
        if self.layers_per_recipe < 1:
            raise ConfigError(
                f"layers_per_recipe is {self.layers_per_recipe}, it must be at least 1"
            )
        if self.defrag_threshold < 1:
            raise ConfigError(f"defrag_threshold is {self.defrag_threshold}, it must be at least 1")
        first, last = self.profiled_steps
        if last is not None and first > last:
            raise ConfigError(f"profiler_steps begins at {first} and ends before, at {last}")

    @property
    def profiled_steps(self) -> tuple[int, int | None]:
        """(first, last) step of a trace; None: it has no end. Raises ConfigError."""
        if self.profiler_steps is None:
            return 0, None
        words = self.profiler_steps.split(",")
        if len(words) > 2 or not all(word.strip().isdecimal() for word in words):
            raise ConfigError(
                f"profiler_steps is {self.profiler_steps!r}, it must be FIRST,LAST or LAST"
            )
        return (int(words[0]) if len(words) == 2 else 0), int(words[-1])


@dataclass(frozen=True, slots=True)
class WarmupConfig:
    """What is prepared before, or beside, the first request."""

    mode: str = "full"
    """full; background: ready after the most useful buckets, the others between requests; skip."""
    traffic: str | None = None
    """background: lengths of real requests, whose buckets come first; None: the small ones."""
    full_guards_off: bool = False
    """torch-compile: no guard is checked after warm-up, a shape that is not warm is an error
    (VLLM_FULL_WARMUP)."""
    on_unwarmed_shape: str = "run"
    """A launch whose shape is not prepared: run (and compile), pad to the next prepared one if
    there is any, or reject the requests that need it."""
    graph_memory_fraction: float = 0.1
    """Of the usable memory, for captured graphs (VLLM_GRAPH_RESERVED_MEM)."""
    graph_prompt_ratio: float = 0.3
    """Of that, for prompts (VLLM_GRAPH_PROMPT_RATIO)."""
    prompt_order: str = "min_tokens"
    """Which prompt buckets are captured first (VLLM_GRAPH_PROMPT_STRATEGY)."""
    decode_order: str = "max_bs"
    """Which decode buckets are captured first (VLLM_GRAPH_DECODE_STRATEGY)."""

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, WARMUPS)
        _one_of("on_unwarmed_shape", self.on_unwarmed_shape, ON_UNWARMED)
        _one_of("prompt_order", self.prompt_order, CAPTURE_ORDERS)
        _one_of("decode_order", self.decode_order, CAPTURE_ORDERS)
        _share("graph_memory_fraction", self.graph_memory_fraction)
        _share("graph_prompt_ratio", self.graph_prompt_ratio)


@dataclass(frozen=True, slots=True)
class EmulatorSettings:
    """The card that --device hpu-emulator imitates."""

    card: str = "gaudi2"
    memory_bytes: int = 4 << 30
    """Taken from the host's memory."""
    compile_delay_s: float = 0.0
    """Host time of each compilation."""
    is_strict: bool = False
    """A misuse of the device ends the worker instead of being counted."""

    def __post_init__(self) -> None:
        _one_of("card", self.card, CARDS)
        if self.memory_bytes < 1 << 20:
            raise ConfigError(f"memory_bytes is {self.memory_bytes}, it must be at least 1 MiB")
        if self.compile_delay_s < 0:
            raise ConfigError(f"compile_delay_s is {self.compile_delay_s}, it must be at least 0")


class ModeChoice(NamedTuple):
    """One of the four modes, and why."""

    mode: str
    reason: str

    @property
    def is_lazy(self) -> bool:
        """Whether PT_HPU_LAZY_MODE must be 1 before the runtime's first import."""
        return self.mode in (HPU_GRAPHS, LAZY)


def choose_mode(
    asked: str, *, enforce_eager: bool, lazy_variable: str | None, has_vendor_torch: bool
) -> ModeChoice:
    """The vendor's table, with `auto` filled in. Raises ConfigError for a contradiction.

    `lazy_variable` is PT_HPU_LAZY_MODE as it is set (None: not set); anything but the string 0
    means lazy, as the runtime reads it. `has_vendor_torch`: whether torch is the vendor's build,
    which lazy mode and HPU graphs need.

    PT_HPU_LAZY_MODE  enforce_eager  mode
    0                 no             torch-compile
    0                 yes            eager
    1                 no             hpu-graphs
    1                 yes            lazy
    """
    wants_lazy = None if lazy_variable is None else lazy_variable != "0"
    if asked == "auto":
        is_lazy, reason = wants_lazy, f"PT_HPU_LAZY_MODE is {lazy_variable}"
        if is_lazy is None:
            is_lazy = has_vendor_torch
            reason = (
                "torch is the vendor's build"
                if has_vendor_torch
                else "HPU graphs need the vendor's build of torch, and this is another"
            )
        if enforce_eager:
            choice = ModeChoice(LAZY if is_lazy else EAGER, f"{reason}, eager is enforced")
        else:
            choice = ModeChoice(HPU_GRAPHS if is_lazy else TORCH_COMPILE, reason)
    else:
        choice = ModeChoice(asked, f"--execution-mode {asked}")
        if enforce_eager and asked in (HPU_GRAPHS, TORCH_COMPILE):
            raise ConfigError(
                f"execution-mode is {asked!r} and enforce-eager is on: one of them must go"
            )
        if wants_lazy is not None and wants_lazy != choice.is_lazy:
            raise ConfigError(
                f"execution-mode is {asked!r} and PT_HPU_LAZY_MODE is {lazy_variable!r}: this mode "
                f"needs {int(choice.is_lazy)}"
            )
    if choice.is_lazy and not has_vendor_torch:
        raise ConfigError(
            f"execution mode {choice.mode!r} ({choice.reason}) needs the vendor's build of torch, "
            f"and this is another: use --execution-mode torch-compile, and unset PT_HPU_LAZY_MODE"
        )
    return choice
