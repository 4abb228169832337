"""Checks of the self-test, which are discovered by their files, and the orders for a process that
runs checks. A check tests an assumption about a card with a small program, and lists settings that
work without the assumption."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from config.execution import EmulatorSettings
from hpu.gaudi_devices import (
    GENERATIONS,
    VENDOR_PACKAGE,
    CardGeneration,
    has_kernel,
    max_experts,
    release_of,
)

if TYPE_CHECKING:
    from torch import Tensor

CHECKS_FOLDER = Path(__file__).parent / "checks"
HOLDS, FAILS, HANGS, UNKNOWN = "holds", "fails", "hangs", "unknown"
"""Possible outcomes of a check."""
BFLOAT16 = 0.03
"""Tolerance of bfloat16 results."""
LAZY, COMPILE = "lazy", "compile"
"""Modes of the runtime in which a check runs: PT_HPU_LAZY_MODE=1 and 0."""


class NotApplicable(Exception):
    """The assumption does not apply to this card, release or build of torch."""


class Fallback(NamedTuple):
    """Values of a setting that avoid a wrong assumption, best first."""

    setting: str
    """Name of a flag, without dashes, or of a variable of the vendor's runtime."""
    values: tuple[str, ...]
    """Values in the form of the help text; `on` and `off` for a switch."""


class Comparison(NamedTuple):
    """A value that the card computed, and the expected value."""

    what: str
    found: object
    expected: object
    tolerance: float = 1e-3
    """Maximum difference of float tensors, relative to the expected value, or to 1 if that is
    larger. All other values must be equal."""


Program = Callable[["Card"], Iterable[Comparison]]
"""Yields comparisons; each is evaluated before the program continues. Raises NotApplicable."""


@dataclass(frozen=True, slots=True)
class Check:
    """An assumption about a card, the program that tests it, and the settings to use if it is
    wrong."""

    name: str
    assumption: str
    source: str
    """Where the assumption comes from, such as a repository or the vendor's documentation."""
    program: Program
    fallbacks: tuple[Fallback, ...]
    mode: str = LAZY
    needs: tuple[str, ...] = ()
    """Checks that must hold, otherwise this check is not meaningful."""
    is_quick: bool = False
    """Whether the quick part includes the check."""
    limit_s: float = 30.0
    num_ranks: int = 1


class ModelShape(msgspec.Struct, frozen=True):
    """Sizes of a model, used to check the fused kernels."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    hidden_size: int = 64
    num_experts: int = 4
    experts_per_token: int = 2


class Orders(msgspec.Struct, frozen=True):
    """The checks that a process of the self-test runs, and the card."""

    device: str
    software: str = ""
    """Version of the vendor's runtime; for an emulated card, the version of the emulator's
    settings."""
    emulator: EmulatorSettings = EmulatorSettings()
    shape: ModelShape = ModelShape()
    names: tuple[str, ...] = ()
    """Checks to run, in this order."""
    rank: int = 0
    num_ranks: int = 1
    folder: str = ""
    """Temporary folder for compiled recipes and for the rendezvous of the ranks."""


class Began(msgspec.Struct, frozen=True, tag=True):
    """The process has started a check; `name` is empty while it opens the card, before the first
    check."""

    name: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The process has finished a check; `name` is empty if the card could not be opened."""

    name: str
    status: str
    detail: str
    seconds: float = 0.0
    left_allocations: int = 0
    """Allocations of device memory that the check left in use."""


Report = Began | Ended


@cache
def all_checks() -> Mapping[str, Check]:
    """All checks by name, each after the checks that it needs. A file in the folder of checks lists
    its checks in CHECKS. Raises ValueError if two checks have the same name."""
    found: dict[str, Check] = {}
    for module in iter_modules([str(CHECKS_FOLDER)], f"{__package__}.checks."):
        for check in import_module(module.name).CHECKS:
            if check.name in found:
                raise ValueError(f"two checks are named {check.name}")
            found[check.name] = check
    needs = {name: check.needs for name, check in found.items()}
    return {name: found[name] for name in TopologicalSorter(needs).static_order()}


class Card:
    """The vendor's interface in this process, and torch. Creating a Card loads the runtime, which
    acquires the card at the first operation."""

    def __init__(
        self,
        software: str,
        rank: int = 0,
        recipe_folder: str = "",
        shape: ModelShape = ModelShape(),  # noqa: B008  # frozen
    ) -> None:
        self.torch: ModuleType = import_module("torch")
        core = self.module("core")
        self.hpu = self.module("hpu")
        self.metrics = self.module("hpu.metrics")
        self.rank = rank
        self.shape = shape
        self.recipe_folder = recipe_folder
        self._release = release_of(software)
        self.mark: Callable[[], None] = core.mark_step
        """Ends the recipe and launches it; no effect outside of lazy mode."""

    def module(self, name: str) -> ModuleType:
        """A module of the vendor's package."""
        return import_module(f"{VENDOR_PACKAGE}.{name}")

    def kernels(self) -> ModuleType:
        """The vendor's fused kernels."""
        return self.module("hpex.kernels")

    @property
    def generation(self) -> CardGeneration:
        """Generation of the card. Raises NotApplicable if it is unknown."""
        return GENERATIONS[self._generation_name()]

    def _generation_name(self) -> str:
        experimental = self.module("utils.experimental")
        kinds, found = experimental.synDeviceType, experimental._get_device_type()
        names = {kinds.synDeviceGaudi2: "gaudi2", kinds.synDeviceGaudi3: "gaudi3"}
        if found not in names:
            raise NotApplicable(f"the generation of the card is unknown: {found}")
        return names[found]

    def need_kernel(self, kernel: str) -> None:
        """Raise NotApplicable if this kernel is not known on this card with the installed
        release."""
        name = self._generation_name()
        if not has_kernel(kernel, name, self._release):
            raise NotApplicable(f"{kernel} is not known on {name} with this release")

    @property
    def max_experts(self) -> int | None:
        """Maximum number of experts in a call of mixture_of_experts; None: no known limit."""
        return max_experts(self._release)

    def values(self, *shape: int, seed: int = 0) -> "Tensor":
        """Random multiples of 1/8 between -2 and 2 on the CPU, float32: exact in bfloat16 and
        float16, and their sums are exact in float32."""
        generator = self.torch.Generator().manual_seed(seed)
        found: Tensor = self.torch.randint(-16, 17, shape, generator=generator) / 8
        return found

    def unequal(self, *shape: int, seed: int = 0) -> "Tensor":
        """Distinct multiples of 1/8 on the CPU in a random order, a third of them negative, for
        programs that must not depend on the order of ties."""
        count = math.prod(shape)
        generator = self.torch.Generator().manual_seed(seed)
        order: Tensor = self.torch.randperm(count, generator=generator)
        return (order.view(shape) - count // 3) / 8

    def put(self, tensor: "Tensor") -> "Tensor":
        """Copy of `tensor` on the card."""
        return tensor.to("hpu")

    def synchronize(self) -> None:
        """Wait for all work."""
        self.mark()
        self.hpu.synchronize()

    def graph(
        self, function: "Callable[..., object]", *, keeps_tensors: bool = False
    ) -> "Callable[..., Tensor]":
        """Wrap `function`: the first call with inputs of a shape captures it, later calls replay
        the graph. `keeps_tensors`: with the tensor cache."""
        graphed: Callable[..., Tensor] = self.hpu.wrap_in_hpu_graph_func(
            function, disable_tensor_cache=not keeps_tensors
        )

        def replay(*inputs: "Tensor") -> "Tensor":
            self.mark()
            found = graphed(*inputs)
            self.mark()
            return found

        return replay

    def num_fallbacks(self) -> int:
        """Number of operations that fell back to the host; 0 if the runtime does not count them."""
        metric = self.metrics.metric_global("cpu_fallback")
        return int(dict(metric.stats()).get("TotalNumber", 0)) if metric else 0

    def free_bytes(self) -> int:
        """Free device memory in bytes, after all work is done."""
        self.synchronize()
        return int(self.hpu.mem_get_info()[0])
