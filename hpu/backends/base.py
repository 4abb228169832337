"""Backend: the interface of a device. Everything above uses devices only through it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from config.errors import ConfigError
from config.model.kv_cache_dtype import AUTO
from config.model.model_config import ModelConfig
from hpu.backends.pages_ahead import PagesAhead
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.ops.kernels import Kernels
from hpu.quantization.base import LinearMethod, ModelPatcher, MoEMethod
from hpu.quantization.kv_cache import KVCacheFormat
from hpu.quantization.stored.mxfp4 import Mxfp4Experts
from hpu.quantization.stored.weights import StoredExperts, StoredWeight

Function = TypeVar("Function", bound=Callable[..., Any])


class Event(Protocol):
    """A point in a device's queue of work."""

    def wait(self) -> None:
        """Block the host until the work before the point is done."""
        ...

    def done(self) -> bool:
        """Whether that work is done, without waiting."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Device time from an earlier event of the same backend to this one; both are done."""
        ...


class Graph(Protocol):
    """A captured forward pass: fixed outputs, replayed without Python."""

    def replay(self, *inputs: Any) -> Any:
        """Run on `inputs`: tensors of the shapes of the capture's, or, without `rebinds_inputs`,
        the capture's own. Returns the same tensors each time."""
        ...


@runtime_checkable
class FusibleModel(Protocol):
    """A model that can run on fused kernels."""

    config: ModelConfig
    dtype: torch.dtype

    @property
    def layers(self) -> Iterable[nn.Module]: ...

    def use_kernels(self, kernels: Kernels, *, split_qkv: bool = False) -> None: ...


class Backend(Protocol):
    """One device of one kind, owned by this process. Not thread-safe. A back end inherits the calls
    that mean nothing to it: those without a result do nothing here.

    A device runs work in the order of submission, `upload` included; only the copies of `to_host`
    may run concurrently with later work.
    """

    name: str
    device: torch.device
    index_dtype: torch.dtype
    """Integer type of positions, slots and block lists."""
    default_dtype: torch.dtype
    fast_dtypes: tuple[torch.dtype, ...]
    """Dtypes that run at full speed: a checkpoint in one of them keeps its dtype."""
    card: str
    """Kind of the card, as its driver names it; empty if there is none."""
    driver: str
    """Version of the device's driver; empty if there is none or it is unknown."""
    software: str
    """Version of the vendor's runtime; empty likewise."""
    default_block_size: int
    default_strategy: str
    """Bucket strategy for `auto`."""
    captures: bool
    """Whether `capture` gives a speed-up; if not, launches run the function itself."""
    compiles: bool
    """Whether the first launch of a shape compiles, captured or not."""
    reads_contiguously: bool
    """Whether a decode is faster when it reads the KV cache as one slice, with blocks of other
    requests, than when it gathers its blocks."""
    shares_host_memory: bool
    """Whether device memory is host memory, most of which must be left to other processes."""
    rebinds_inputs: bool
    """Whether an upload into a tensor that a launch reads waits for that launch, and a graph's
    replay may read other tensors than its capture: then inputs have two sets of device memory."""

    world: ProcessGroup = SINGLE
    """The ranks that run one model. A back end joins them before it touches its device, and leaves
    them in `close`."""

    def dtype_for(self, facts: ModelConfig, *, is_plain: bool = True) -> torch.dtype:
        """The dtype of a model for which none was asked: the checkpoint's if it is fast, else the
        default. `is_plain`: a decoder that is built in, with all layers and all experts here."""
        dtype = getattr(torch, facts.dtype, None)
        return dtype if dtype in self.fast_dtypes else self.default_dtype

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, after all work is done."""
        ...

    def peak_memory(self) -> int | None:
        """Peak of the bytes in use since `reset_peak`, after all work is done; None if the device
        does not count them."""
        ...

    def reset_peak(self) -> None:
        """Restart the measurement of `peak_memory`."""
        return

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether `error`, raised by work on the device, says that its memory is full. The device
        remains usable after such an error."""
        ...

    def is_compile_failure(self, error: Exception) -> bool:
        """Whether `error`, raised by work on the device, says that its compiler refused a recipe.
        The device remains usable after such an error."""
        return False

    def synchronize(self) -> None:
        """Wait for all work."""
        return

    def mark_step(self) -> None:
        """End the recipe, on a device that collects operations into recipes."""
        return

    def event(self) -> Event:
        """A point after all work submitted so far."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zeroed device tensor; if the device can, a page uses memory only when it is written."""
        ...

    def pages_ahead(self, caches: Sequence[Tensor], num_blocks: int) -> PagesAhead | None:
        """What gives caches of `zeros`, of so many blocks each, memory before it is written; None:
        they have it."""
        return None

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        """A flat host tensor that `upload` reads fast (pinned, if that helps)."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start a copy to the host; valid when an `event()` created after it is done. Until then
        nothing may write to `tensor`; it may be dropped."""
        ...

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy a host tensor into a device tensor of the same shape, without waiting.

        The source must not change until an `event()` created after the call is done.
        """
        ...

    def upload_beside(self, copies: Sequence[tuple[Tensor, Tensor]], after: Any) -> None:
        """As `upload`, to each of (target, source), beside the work behind the event `after` if the
        device can: neither that work nor later host code may write to them, and that work does not
        read the targets. Work that is submitted later waits for the copies."""
        for target, source in copies:
            self.upload(target, source)

    def capture(
        self,
        function: Callable[..., Any],
        inputs: tuple[Any, ...],
        *,
        frees_intermediates: bool = False,
    ) -> Graph:
        """Record `function(*inputs)`; the tensors in `inputs` become the graph's inputs.

        The function has run at least once when this returns. `frees_intermediates`: it keeps none
        of its intermediates, even on a device that keeps those of the model's graphs.
        """
        ...

    def compiled(self, function: Function) -> Function:
        """`function`, a pure function of tensors, compiled as a whole or run as one recipe, on a
        device that compiles. Its first call with new shapes compiles."""
        return function

    def begin_load(self, patcher: ModelPatcher | None = None) -> None:
        """A model that `patcher` will patch is about to be made."""
        return

    def prepare(self, model: nn.Module, patcher: ModelPatcher | None = None) -> nn.Module:
        """Prepare a loaded model for this device: fused kernels, what `patcher` replaces, packed
        weights, compiled layers. Returns the model to run: `model` itself, or a faster one with the
        same interface."""
        ...

    def prepare_tower(self, tower: nn.Module) -> None:
        """Replace what the device does better in a loaded vision tower, whose weights are counted
        before."""
        return

    def linear_method(self, weight: StoredWeight, dtype: torch.dtype) -> LinearMethod | None:
        """How the device multiplies activations of `dtype` by a weight that a checkpoint has
        quantized; None: by the weight in `dtype`, dequantized."""
        return None

    def moe_method(
        self, experts: StoredExperts | Mxfp4Experts, dtype: torch.dtype
    ) -> MoEMethod | None:
        """As `linear_method`, of quantized experts."""
        return None

    def kv_cache_format(self, kv_cache_dtype: str, dtype: torch.dtype) -> KVCacheFormat | None:
        """How a model of `dtype` caches keys and values as --kv-cache-dtype says; None: in `dtype`.
        Raises ConfigError for what the device cannot cache in."""
        own = str(dtype).removeprefix("torch.")
        if kv_cache_dtype in (AUTO, own):
            return None
        raise ConfigError(
            f"--kv-cache-dtype is {kv_cache_dtype} and the device is {self.name}, which caches "
            f"keys and values in the data type of the model, {own}"
        )

    @property
    def prefill_launch_tokens(self) -> int:
        """As WorkerReady.prefill_launch_tokens, for the prepared model."""
        return 0

    def expect(self, num_tokens: int, num_rows: int) -> None:
        """A hint: the next forward pass has `num_tokens` and samples at most `num_rows` rows."""
        return

    def end_warmup(self) -> None:
        """Warm-up is over: from now on nothing should compile."""
        return

    def begin_warmup(self) -> None:
        """Free all captured graphs, which are not replayed again; another warm-up follows."""
        return

    def close(self) -> None:
        """Release the device."""
        return
