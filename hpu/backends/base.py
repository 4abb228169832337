"""Backend: interface of a device."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from config.engine import SchedulerConfig
from config.errors import ConfigError
from config.model.kv_cache_dtype import AUTO
from config.model.model_config import ModelConfig
from hpu.backends.page_prefaulter import PagePrefaulter
from hpu.backends.runtime_metrics import RuntimeMetrics
from hpu.distributed.process_groups import SINGLE, ProcessGroup, ProcessGroups, make_groups
from hpu.ops.kernels import Kernels
from hpu.quantization.base import LinearMethod, MoEMethod
from hpu.quantization.inc import IncCompressor
from hpu.quantization.kv_cache import KVCacheFormat
from hpu.quantization.stored.mxfp4 import Mxfp4Experts
from hpu.quantization.stored.weights import StoredExperts, StoredWeight

Captured = Callable[..., Any]
"""A function that a graph records."""
Function = TypeVar("Function", bound=Captured)


class Event(Protocol):
    """A point in a device's queue of work."""

    def wait(self) -> None:
        """Block the host until the work before this point is done."""
        ...

    def done(self) -> bool:
        """Whether the work before this point is done. Does not block."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Device time since `earlier`, an event of the same backend. Both events must be done."""
        ...


class Graph(Protocol):
    """A captured function: fixed outputs, replayed without Python. A backend that does not capture
    calls the function, which returns new outputs."""

    def replay(self, *inputs: Any) -> Any:
        """Run on `inputs`, which have the shapes of the captured inputs. On a device without
        `Backend.capture_function` they must be the captured tensors themselves. A captured graph
        returns the same output tensors on every call."""
        ...


@runtime_checkable
class FusibleModel(Protocol):
    """A model that can use the fused kernels of a backend."""

    config: ModelConfig
    dtype: torch.dtype

    @property
    def layers(self) -> Iterable[nn.Module]: ...

    def use_kernels(self, kernels: Kernels, *, split_qkv: bool = False) -> None: ...


class Backend(Protocol):
    """A single device, owned by this process. Not thread-safe. Calls that a device does not need
    have default implementations: calls without a result do nothing, except that `upload_beside`
    calls `upload`.

    A device runs work in the order of submission, `upload` included; only the copies of `to_host`
    and `upload_beside` may run concurrently with other work.
    """

    name: str
    device: torch.device
    index_dtype: torch.dtype
    """Integer type of positions, slots and block lists."""
    default_dtype: torch.dtype
    fast_dtypes: tuple[torch.dtype, ...]
    """Dtypes that run at full speed. A checkpoint with a fast dtype keeps its dtype."""
    card: str
    """Name of the Gaudi card, as its runtime reports it; empty for other devices."""
    driver: str
    """Version of the device driver; empty if there is no driver or its version is unknown."""
    software: str
    """Version of the vendor's runtime; empty if there is no runtime or its version is unknown."""
    default_block_size: int
    default_strategy: str
    """Default bucket strategy. Pooling models and configured ranges may need another strategy."""
    captures: bool
    """Whether graphs are captured: `capture` is faster than eager launches, and eager mode is not
    enforced."""
    compiles: bool
    """Whether the first launch of each shape compiles, with or without capture."""
    reads_contiguously: bool
    """Whether decode attention is faster when it reads the KV cache as a contiguous slice, which
    includes blocks of other requests, than when it gathers the blocks of its requests."""
    shares_host_memory: bool
    """Whether device memory is host memory. If so, most of it must be left to other processes."""

    memory_name: str = "device"
    """Name of the device's memory in log lines."""
    recipe: AbstractContextManager[None] = nullcontext()
    """Context for work outside graphs and `compiled` functions, such as an update in place: its end
    is the end of a recipe, on a device that collects operations into recipes. Work without such an
    end becomes part of the next recipe, which may then differ from launch to launch."""
    runtime_metrics: RuntimeMetrics | None = None
    """Counts of the device's runtime; None if it does not count compilations."""
    world: ProcessGroup = SINGLE
    """The ranks of this engine, and of the engines that share experts with it. A backend joins them
    in its constructor and leaves them in `close`."""

    @property
    def sum_dtype(self) -> torch.dtype:
        """Type of sums over a row of logits. Devices with 32-bit indices have no 64-bit
        accumulation, either."""
        return torch.float64 if self.index_dtype == torch.int64 else torch.float32

    def dtype_for(self, model_config: ModelConfig, *, is_plain: bool = True) -> torch.dtype:
        """Dtype of a model with --dtype auto: the checkpoint's dtype if it is fast, else
        `default_dtype`, unless the device overrides it. `is_plain`: a built-in decoder with all
        layers and all experts on this rank."""
        dtype = getattr(torch, model_config.dtype, None)
        return dtype if dtype in self.fast_dtypes else self.default_dtype

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes. Waits for all work first."""
        ...

    def peak_memory(self) -> int | None:
        """Peak bytes in use since `reset_peak`; None if the device does not count them. Waits for
        all work first."""
        ...

    def reset_peak(self) -> None:
        """Reset the peak that `peak_memory` returns."""
        return

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether `error`, raised by work on the device, is an out-of-memory error. The device
        remains usable after it."""
        ...

    def is_compile_failure(self, error: Exception) -> bool:
        """Whether `error`, raised by work on the device, means that the compiler rejected a recipe.
        The device remains usable after it."""
        return False

    def advice(self, error: Exception) -> str:
        """What to try after `error`, raised by work on the device, as the end of a sentence; empty
        without advice."""
        return ""

    def synchronize(self) -> None:
        """Wait for all submitted work."""
        return

    def make_groups(self, *, tensor: int, pipeline: int, data: int) -> ProcessGroups:
        """Create the groups of this rank; see hpu.distributed.process_groups.make_groups."""
        return make_groups(tensor=tensor, pipeline=pipeline, data=data)

    def event(self) -> Event:
        """An event after all work submitted so far."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zeroed device tensor. If the device supports it, a page takes memory only once it is
        written."""
        ...

    def pages_ahead(self, caches: Sequence[Tensor], num_blocks: int) -> PagePrefaulter:
        """Pre-faulting of `caches` (made by `zeros`, `num_blocks` blocks each)."""
        return PagePrefaulter()

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        """A flat host tensor for fast uploads (pinned if that helps)."""
        ...

    def input_tensors(self, size: int, dtype: torch.dtype, count: int) -> Iterator[Tensor]:
        """Flat device tensors among which the uploads of `count` launches in flight alternate: the
        same tensor `count` times; different tensors, each created when it is taken, if an upload
        into a tensor waits for the launch that reads it; one tensor if no launch is in flight
        during an upload."""
        return itertools.repeat(self.zeros((size,), dtype), count)

    def host_for(self, device: Tensor) -> Tensor:
        """Flat host tensor to fill before an `upload` to the flat tensor `device`: `device` itself
        if device memory is host memory."""
        return self.host_tensor(len(device), device.dtype)

    def device_copies(self, *hosts: Tensor) -> tuple[Tensor, ...]:
        """Upload `hosts` to new device tensors; returns `hosts` themselves if device memory is host
        memory. The sources must not change, as in `upload`."""
        # All tensors are created first, in one recipe.
        targets = tuple(self.zeros(tuple(host.shape), host.dtype) for host in hosts)
        for target, host in zip(targets, hosts, strict=True):
            self.upload(target, host)
        return targets

    def capture_input(self, uploaded: Tensor) -> Tensor:
        """Tensor to capture for graphs whose replays read `uploaded`, a target of uploads."""
        return uploaded

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start a copy to the host. The result is valid when an `event()` created after this call
        is done. Until then nothing may write to `tensor`; the caller may drop its reference."""
        ...

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy a host tensor into a device tensor of the same shape. Does not wait for the copy,
        except for large tensors on a Gaudi, for unpinned tensors on a GPU, and on a device that
        shares the host's memory; a Gaudi also waits for the launch that reads `target`.

        The source must not change until an `event()` created after the call is done.
        """
        ...

    def upload_beside(self, copies: Sequence[tuple[Tensor, Tensor]], after: Any) -> None:
        """Upload each (target, source), concurrently with the work after the event `after` if the
        device supports it. That work must neither read nor write the targets, and neither that work
        nor later host code may write to the sources. Work submitted later waits for the copies."""
        for target, source in copies:
            self.upload(target, source)

    def capture(self, function: Captured, inputs: tuple[Any, ...]) -> Graph:
        """Record `function(*inputs)`; the tensors in `inputs` become the graph's inputs.

        The function has run at least once when this returns.
        """
        ...

    def capture_function(
        self,
        function: Captured,
        inputs: tuple[Any, ...],
        *,
        frees_intermediates: bool = False,
    ) -> Graph | None:
        """Record a function whose replays get other tensors than `inputs`; None: graphs of this
        device read the captured tensors only. `frees_intermediates`: free the intermediates of the
        graph, even on a device that keeps intermediates of the model's graphs."""
        return None

    def compiled(self, function: Function) -> Function:
        """The form of `function`, a pure function of tensors, that this device runs fastest:
        compiled as a whole, run as a single recipe, or unchanged. The first call with new shapes
        may compile."""
        return function

    def begin_load(self, patcher: IncCompressor | None = None) -> None:
        """Called before a decoder is created. `patcher`: the compressor that will patch it, if
        any."""
        return

    def adapt(self, model: nn.Module) -> None:
        """Change layers of `model` that the device cannot run as they are. For a module that is not
        passed to `prepare`, which includes this change."""
        return

    def prepare(self, model: nn.Module, patcher: IncCompressor | None = None) -> nn.Module:
        """Prepare a loaded model for this device: fused kernels, the patches of `patcher`, packed
        weights, compiled layers. Returns the model to run: `model` itself, or a faster model with
        the same interface."""
        ...

    def prepare_tower(self, tower: nn.Module) -> None:
        """Install this device's faster layers in a loaded vision tower. The tower's weights have
        already been counted."""
        return

    def linear_method(self, weight: StoredWeight, dtype: torch.dtype) -> LinearMethod | None:
        """Method that multiplies activations of `dtype` by a quantized weight of a checkpoint;
        None: dequantize the weight to `dtype`."""
        return None

    def moe_method(
        self, experts: StoredExperts | Mxfp4Experts, dtype: torch.dtype
    ) -> MoEMethod | None:
        """Method for quantized experts with activations of `dtype`; None: dequantize the experts to
        `dtype`."""
        return None

    def kv_cache_format(self, kv_cache_dtype: str, dtype: torch.dtype) -> KVCacheFormat | None:
        """KV cache format for --kv-cache-dtype and a model of `dtype`; None: cache in `dtype`.
        Raises ConfigError for a format that the device does not support."""
        own = str(dtype).removeprefix("torch.")
        if kv_cache_dtype in (AUTO, own):
            return None
        raise ConfigError(
            f"--kv-cache-dtype is {kv_cache_dtype} and the device is {self.name}, which supports "
            f"only the model's data type, {own}"
        )

    def prompts_per_row(self, scheduler: SchedulerConfig) -> int:
        """Maximum number of sequences concatenated in a row of a prefill."""
        return 1

    @property
    def prefill_launch_tokens(self) -> int:
        """WorkerReady.prefill_launch_tokens for the prepared model."""
        return 0

    def expect(self, num_tokens: int, num_rows: int) -> None:
        """Hint: the next forward pass has `num_tokens` tokens and computes logits of at most
        `num_rows` rows."""
        return

    def compile_only(self) -> AbstractContextManager[bool]:
        """A context in which launches are compiled and not executed, without waiting. Its value is
        whether the device has such a mode; if not, launches are executed.

        Tensors that are created inside hold garbage afterwards, other tensors keep their contents,
        and copies to the host are garbage. Errors may belong to an earlier launch.
        """
        return nullcontext(False)

    def drops_weights(self, sleep_level: int) -> bool:
        """Whether a sleep frees the memory of the weights."""
        return True

    def end_warmup(self) -> None:
        """Called at the end of warm-up. Nothing should compile after it."""
        return

    def begin_warmup(self) -> None:
        """Called before another warm-up: no graph that was captured before this call is replayed
        again."""
        return

    def close(self) -> None:
        """Release the device."""
        return
