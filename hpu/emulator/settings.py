"""Settings of an emulated card, and the runtime variables that it reads."""

import re
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from config.errors import ConfigError, GaudiserveError
from config.execution import EMULATED_RELEASE
from config.loading.recipe_cache import RECIPE_CACHE_CONFIG, refused_form
from hpu.emulator.faults import check_names
from hpu.gaudi_devices import GENERATIONS


class Misuse(GaudiserveError):
    """A program broke a rule of the device in strict mode. The message names the op and the
    caller's line."""

    def __init__(self, kind: str, text: str, op: str, line: str) -> None:
        super().__init__(f"{kind}: {text} [{op or 'no op'}, called from {line}]")
        self.kind = kind
        self.op = op
        self.line = line


@dataclass(frozen=True, slots=True)
class EmulatorConfig:
    """Settings of an emulated card: generation, memory, costs, and how misuses are handled."""

    generation: str = "gaudi2"
    memory_bytes: int | None = 4 << 30
    """Device memory, allocated on the host; None: as much as the real card has."""
    num_devices: int = 8
    strict: bool = False
    """Raise `Misuse` for a misuse, after counting it, instead of continuing as the device does."""
    tolerated: frozenset[str] = frozenset()
    """Kinds of misuse that strict mode counts without raising."""
    compile_delay_s: float = 0.0
    """Host time of each compilation, in seconds."""
    graph_bytes: int = 8 << 20
    """Device memory of each captured graph, in addition to its tensors."""
    max_graph_ops: int | None = None
    """Maximum ops of a captured graph, beyond which the compiler fails; None: no limit."""
    workspace_ratio: float = 1.0
    """Workspace of a recipe, as a fraction of the bytes of its largest output."""
    default_lazy: bool = False
    """Mode if PT_HPU_LAZY_MODE is unset; the default changed around release 1.20."""
    vendor_torch: bool = True
    """Whether torch counts as the vendor's build; other builds do not support lazy mode."""
    release: str = EMULATED_RELEASE
    lock_dir: Path | None = None
    """Folder of the lock files that reserve a card for a process; None: no locks."""
    release_delay_s: float = 0.0
    """Seconds that a card stays busy after its release."""
    collective_timeout_s: float = 30.0
    late_copy_s: float = 0.0
    """Maximum seconds between the end of an asynchronous copy to the host, as events report it, and
    the arrival of its bytes: a thread of the runtime writes the bytes, and no event waits for it. A
    large asynchronous upload may read its source this much later."""
    late_copy_seed: int = 0
    multiplies_float32: bool = True
    """Whether the card multiplies float32 matrices: Gaudi 2B, 2C and 2D do not."""
    reads_kernel_path: bool = False
    """Whether compilation fails if GC_KERNEL_PATH is empty or not set."""
    pins_memory: bool = False
    """Whether the runtime can allocate pinned host memory."""
    launch_submit_s: float = 0.0
    """Seconds that a thread of the runtime takes to submit a launch of lazy mode."""
    runs_on_host: bool = False
    """Whether the vendor's operators also take tensors of the host, which the bridge refuses."""
    unknown_variables: frozenset[str] = frozenset()
    """Runtime variables that an older release does not know."""
    extra_supported: frozenset[str] = frozenset()
    unsupported: frozenset[str] = frozenset()
    """Op names (`aten::sort`) that fall back to the host, in addition to all unlisted ops."""

    faults: frozenset[str] = frozenset()
    """Names of the faults that this card emulates."""

    def __post_init__(self) -> None:
        check_names(self.faults)
        if self.generation not in GENERATIONS:
            known = ", ".join(GENERATIONS)
            raise ConfigError(f"emulated device {self.generation!r} is not one of {known}")
        if self.memory_bytes is not None and self.memory_bytes < 1 << 20:
            raise ConfigError(f"an emulated card needs 1 MiB, got {self.memory_bytes} bytes")

    @property
    def limit_bytes(self) -> int:
        return self.memory_bytes or GENERATIONS[self.generation].memory_bytes


@dataclass(slots=True)
class RuntimeVariables:
    """The runtime's variables, read like the runtime does: some once, some at each use."""

    environment: MutableMapping[str, str]
    default_lazy: bool
    release: str = EMULATED_RELEASE
    _lazy: bool | None = field(default=None, init=False)
    _lazy_collectives: bool | None = field(default=None, init=False)
    _native: dict[str, str] = field(default_factory=dict, init=False)

    def lazy(self) -> bool:
        """Whether the mode is lazy. Read once. Raises RuntimeError for a word, which the runtime's
        library cannot read (parse_env_numeric in the bridge's env_flags.cpp), and
        NotImplementedError for other numbers than 0 and 1. Above 1, lazy mode launches each
        operator, but no event and no change of the stream launches any (lazy_kernels.cpp,
        HPUStream.cpp, HPUEvent.cpp). With a leading zero, the number is octal to the library, and
        a word other than 0 to its Python code (utils/internal.py). Raises ValueError for an empty
        value, which the import of hccl converts to a number (distributed/hccl/__init__.py)."""
        if self._lazy is None:
            text = self.environment.get("PT_HPU_LAZY_MODE")
            if text == "":
                raise ValueError("PT_HPU_LAZY_MODE is empty: invalid literal for int()")
            if text and not re.fullmatch("[0-9]{1,18}", text):
                raise RuntimeError(_unreadable("PT_HPU_LAZY_MODE", text))
            if text and text not in ("0", "1"):
                raise NotImplementedError(f"PT_HPU_LAZY_MODE={text} is not modelled")
            self._lazy = self.default_lazy if text is None else text == "1"
        return self._lazy

    def mode_is_read(self) -> bool:
        return self._lazy is not None

    def tensor_cache_disabled(self, argument: bool) -> bool:
        """Whether captures run without tensor cache. The variable wins over the argument, and only
        the exact string 1 is true."""
        text = self.environment.get("PT_HPUGRAPH_DISABLE_TENSOR_CACHE")
        return argument if text is None else text == "1"

    def lazy_collectives(self) -> bool:
        """Whether collectives are lazy. Read once, at the latest when `hccl` is imported: the
        import chooses the native library."""
        if self._lazy_collectives is None:
            self._lazy_collectives = self.flag("PT_HPU_ENABLE_LAZY_COLLECTIVES")
        return self._lazy_collectives

    def may_fall_back(self, op: str) -> bool:
        """Whether the operator may run on the host: PT_HPU_PLACE_ON_CPU lists such operators, or is
        `none`; by default all may (the bridge's fallback_helper.h)."""
        text = self.native("PT_HPU_PLACE_ON_CPU")
        names = [name.strip() for name in text.split(",") if name.strip()]
        return not names or op in names or op.removeprefix("aten::") in names

    def flag(self, name: str) -> bool:
        """A switch of the native library. Raises RuntimeError for an unknown word (parse_env_bool
        in the bridge's env_flags.cpp)."""
        return _read_switch(name, self.environment.get(name, ""))

    def flag_of_metrics(self, name: str) -> bool:
        """A switch that the Python code of the metrics reads: it has more words for true, and any
        other word is false (bool_helper in the bridge's metrics.py)."""
        return self.environment.get(name, "").lower() in ("y", "yes", "t", "true", "on", "1")

    def forces_tanh(self) -> bool:
        """Whether gelu is approximated by tanh: by default it is (the bridge's env_flags.yaml)."""
        text = self.native("PT_HPU_FORCE_TANH_FOR_GELU")
        return _read_switch("PT_HPU_FORCE_TANH_FOR_GELU", text or "1")

    def check(self) -> None:
        """Raise RuntimeError for a word that the library cannot read when it is loaded, and
        NotImplementedError if a variable switches all launches off."""
        self.flag("PT_HPU_INFERENCE_MODE")
        if self.flag("PT_COMPILE_ONLY_MODE"):
            raise NotImplementedError("PT_COMPILE_ONLY_MODE from the start is not modelled")

    def int64(self) -> bool:
        """Whether int64 has 64 bits: by default only outside of lazy mode."""
        text = self.native("PT_ENABLE_INT64_SUPPORT")
        return _read_switch("PT_ENABLE_INT64_SUPPORT", text) if text else not self.lazy()

    def native(self, name: str) -> str:
        """A variable of the native library, which caches the value of the first read, even if the
        variable was missing (the bridge's env_flags_impl.h)."""
        if name not in self._native:
            self._native[name] = self.environment.get(name, "")
        return self._native[name]

    def modules(self) -> list[int]:
        text = self.environment.get("HABANA_VISIBLE_MODULES", "")
        return [int(word) for word in text.split(",") if word.strip()] or list(range(8))

    def recipe_cache(self) -> Path | None:
        """Folder of the recipe cache on disk; None without a disk cache. In inference mode the rank
        is appended to a folder of PT_HPU_RECIPE_CACHE_CONFIG (the bridge's
        recipe_cache_config.cpp). Raises RuntimeError for a form that a build of the release may
        refuse (its env_flags_impl.cpp)."""
        config = self.environment.get(RECIPE_CACHE_CONFIG, "")
        if reason := refused_form(config, self.release):
            raise RuntimeError(f"Flags name: {RECIPE_CACHE_CONFIG},{config}: {reason}")
        text = config.partition(",")[0]
        if text and self.flag("PT_HPU_INFERENCE_MODE"):
            text += self.environment.get("RANK", "0")
        text = text or self.environment.get("PT_RECIPE_CACHE_PATH", "")
        return Path(text) if text else None

    def deletes_recipes(self) -> bool:
        """Whether this process deletes earlier recipes, which only local rank 0 does (the bridge's
        cache_file_handler.cpp). Raises RuntimeError for an unknown word."""
        words = self.environment.get(RECIPE_CACHE_CONFIG, "").split(",")
        word = words[1] if len(words) > 1 else ""
        deletes = _read_switch("PT_CACHE_FOLDER_DELETE", word)
        return deletes and self.environment.get("LOCAL_RANK", "0") == "0"


TRUE, FALSE = ("1", "true"), ("0", "false")


def _read_switch(name: str, text: str) -> bool:
    """A switch of the native library, False if it is empty. Raises RuntimeError for an unknown
    word."""
    if text.lower() not in ("", *TRUE, *FALSE):
        raise RuntimeError(_unreadable(name, text))
    return text.lower() in TRUE


def _unreadable(name: str, text: str) -> str:
    return f'Environment variable "{name}"="{text}" couldn\'t be converted properly'
