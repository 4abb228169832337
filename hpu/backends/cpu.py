"""CpuBackend: the host as a device. Work runs synchronously, so an event is done when it is
created.

`prepare` installs packed kernels in the layers of a loaded model, and compiles decoders that the
native library supports.
"""

import logging
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from config.engine import DEFAULT_MEMORY_UTILIZATION, EngineConfig
from config.errors import ConfigError
from config.malloc import retain_freed_memory
from config.model.kv_cache_dtype import AUTO
from config.model.model_config import ModelConfig
from config.progress import OnStep, unreported_step
from hpu.backends.base import Backend, Captured
from hpu.backends.page_prefaulter import PagePrefaulter, ThreadedPrefaulter
from hpu.distributed.agreement import Agreement
from hpu.distributed.process_groups import SINGLE_RANK, Ranks, join, leave
from hpu.host import has_fast_bfloat16, usable_cores, usable_memory
from hpu.layers.embedding import ParallelLMHead
from hpu.layers.linear import Kernel, LinearBase
from hpu.layers.moe import Experts, MoE
from hpu.layers.norm import RMSNorm
from hpu.models.decoder import Decoder
from hpu.native.decoder import CompiledDecoder, is_known
from hpu.native.library import (
    Library,
    PackedExperts,
    PackedLinear,
    Stack,
    Stacks,
    has_experts_kernel,
    has_kernel,
    kernel_folder,
    open_library,
)
from hpu.native.shared_sums import SharedSums
from hpu.native.tower import NativeTowerKernels
from hpu.ops.cpu import MirroredRMSNorm, can_pack, packed_linear, quantized_linear
from hpu.ops.cpu_tower import TowerKernels, use_cpu_kernels_in_tower
from hpu.quantization.base import LinearMethod, MoEMethod
from hpu.quantization.inc import IncCompressor
from hpu.quantization.kv_cache import KVCacheFormat, plain_format
from hpu.quantization.stored.mxfp4 import Mxfp4Experts, Mxfp4MoEMethod
from hpu.quantization.stored.packed import PackedLinearMethod, PackedMoEMethod
from hpu.quantization.stored.packed import can_pack as can_pack_integers
from hpu.quantization.stored.weights import StoredExperts, StoredWeight

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector load."""

WEIGHTS_PER_S, MULTIPLICATIONS_PER_S = 5e9, 75e9
"""bfloat16 weights read per second, and multiplications per second, of a single thread. Rough
estimates."""

RETAINED_BYTES = 64 << 20
"""Freed bytes that the allocator keeps while serving: logits of 32 requests and their copies in
sampling."""

SINGLE_THREAD_S = 2e-3
"""Launches estimated below this time on a single thread are not split: on a busy machine each
thread barrier takes up to 5 % of it."""

PREFILL_TOKENS = 512
"""Prompt tokens at which the fixed cost of a launch (reading weights, logits, Python) is small, for
a dense model. Measured on two cores with AVX512-BF16 and 135 million weights, time per token
relative to 2048 tokens: +12 % at 128 tokens, +2 % at 256, +0.5 % at 512. Not measured with AMX."""


class CpuEvent:
    """Event of synchronous work: always done; records its creation time."""

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True

    def seconds_since(self, earlier: "CpuEvent") -> float:
        return self._time_s - earlier._time_s


class CallGraph:
    """Graph without capture: calls the function again."""

    def __init__(self, function: Captured, inputs: tuple[Any, ...]) -> None:
        self._function = function
        function(*inputs)

    def replay(self, *inputs: Any) -> Any:
        return self._function(*inputs)


class CpuBackend(Backend):
    """The CPU with `num_threads` compute threads (None: the usable cores, divided among the ranks).
    `kernels`: folder of the compiled kernels, which the first use builds if they are missing; None:
    use torch's own operators. `int8_activations`: see EngineConfig.cpu_int8_activations. `ranks`
    communicate over gloo. `on_step` is called while the kernels are built."""

    name = "cpu"
    card = driver = software = ""
    memory_name = "host"
    default_block_size = 32
    default_strategy = "exact"
    captures = False
    compiles = False
    reads_contiguously = False
    shares_host_memory = True

    def __init__(
        self,
        num_threads: int | None = None,
        kernels: Path | None = None,
        *,
        int8_activations: bool = True,
        ranks: Ranks = SINGLE_RANK,
        on_step: OnStep = unreported_step,
    ) -> None:
        self.device = torch.device("cpu")
        self.index_dtype = torch.int64
        fast = has_fast_bfloat16()
        self.default_dtype = torch.bfloat16 if fast else torch.float32
        self.fast_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
        if fast:
            self.fast_dtypes += (torch.bfloat16,)
        cores = usable_cores()
        threads = num_threads or max(1, cores // ranks.world_size)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        logger.info("CPU: %d compute threads on %d usable cores", threads, cores)
        self._threads = self._threads_in_use = threads
        self._token_cost = self._logits_cost = 0
        """Multiplications of the prepared model per token, and per row of logits."""
        self._weights_per_use = 1.0
        """Weights that a large launch reads divided by the weights multiplied per token: 1 for a
        dense model."""
        self._library: Library | None = None
        """The compiled kernels, if open."""
        self._open: Callable[[], Library | None] = lambda: None
        """Opens the kernels at the first call."""
        if kernels is not None:
            self._open = cache(
                partial(
                    open_library,
                    kernels,
                    threads,
                    int8_activations=int8_activations,
                    on_step=on_step,
                )
            )
        self.world = join("gloo", ranks)

    def open_kernels(self) -> Library | None:
        """The compiled kernels, which the first call opens or compiles; None: use torch's own
        operators."""
        self._library = self._open()
        return self._library

    def memory(self) -> tuple[int, int]:
        return usable_memory()

    def peak_memory(self) -> None:
        return None

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def event(self) -> CpuEvent:
        return CpuEvent()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return _host_zeros(shape, dtype)

    def pages_ahead(self, caches: Sequence[Tensor], num_blocks: int) -> PagePrefaulter:
        if platform.system() != "Linux" or not caches:
            return PagePrefaulter()
        return ThreadedPrefaulter(caches, num_blocks)

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        return _host_zeros((size,), dtype)

    def input_tensors(self, size: int, dtype: torch.dtype, count: int) -> Iterator[Tensor]:
        # The CPU has finished a launch before the host fills the inputs of the next.
        return iter((self.zeros((size,), dtype),))

    def host_for(self, device: Tensor) -> Tensor:
        return device

    def device_copies(self, *hosts: Tensor) -> tuple[Tensor, ...]:
        return hosts

    def to_host(self, tensor: Tensor) -> Tensor:
        # Copied: the caller may write to its tensor again before the host reads the result.
        return tensor.clone()

    def upload(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def capture(self, function: Captured, inputs: tuple[Any, ...]) -> CallGraph:
        return CallGraph(function, inputs)

    def prepare(self, model: nn.Module, patcher: IncCompressor | None = None) -> nn.Module:
        linears = [module for module in model.modules() if isinstance(module, LinearBase)]
        if not linears:
            return model
        costs = {linear: linear.in_features * linear.out_features for linear in linears}
        self._logits_cost = sum(
            costs[linear] for linear in linears if isinstance(linear, ParallelLMHead)
        )
        dense_cost = sum(costs.values()) - self._logits_cost
        mixtures = [module for module in model.modules() if isinstance(module, MoE)]
        self._token_cost = dense_cost + sum(experts.token_cost for experts in mixtures)
        num_read = dense_cost + sum(
            experts.experts.num_experts * experts.experts.expert_cost for experts in mixtures
        )
        self._weights_per_use = num_read / max(1, self._token_cost)
        dtype = linears[0].dtype
        if self._multiplies(dtype) or can_pack(dtype, linears[0].device):
            return use_cpu_kernels(model, self._library)
        logger.debug("Weights are not packed: this CPU has no packed kernel for %s", dtype)
        return model

    def prepare_tower(self, tower: nn.Module) -> None:
        is_bfloat16 = any(weight.dtype == torch.bfloat16 for weight in tower.parameters())
        library = self.open_kernels() if is_bfloat16 else None
        kernels = TowerKernels() if library is None else NativeTowerKernels(library)
        use_cpu_kernels_in_tower(tower, kernels)

    def _multiplies(self, dtype: torch.dtype) -> bool:
        """Whether the native kernels multiply `dtype`. They do not need bfloat16 instructions of
        the CPU."""
        return dtype == torch.bfloat16 and self.open_kernels() is not None

    def dtype_for(self, model_config: ModelConfig, *, is_plain: bool = True) -> torch.dtype:
        dtype = super().dtype_for(model_config, is_plain=is_plain)
        if model_config.dtype == "float32" or not self._multiplies(torch.bfloat16):
            return dtype
        # Without bfloat16 instructions, torch's bfloat16 operators are slow; the native kernels are
        # not.
        return torch.bfloat16 if is_plain and is_known(model_config) else dtype

    def linear_method(self, weight: StoredWeight, dtype: torch.dtype) -> LinearMethod | None:
        if dtype != torch.bfloat16 or not can_pack_integers(weight):
            return None
        return PackedLinearMethod(weight)

    def moe_method(
        self, experts: StoredExperts | Mxfp4Experts, dtype: torch.dtype
    ) -> MoEMethod | None:
        if dtype != torch.bfloat16:
            return None
        if isinstance(experts, Mxfp4Experts):
            return Mxfp4MoEMethod(experts) if experts.has_whole_blocks else None
        can_pack = all(can_pack_integers(weight) for _, weight in experts.named_weights)
        return PackedMoEMethod(experts) if can_pack else None

    def kv_cache_format(self, kv_cache_dtype: str, dtype: torch.dtype) -> KVCacheFormat | None:
        return None if kv_cache_dtype == AUTO else plain_format(kv_cache_dtype, dtype)

    @property
    def prefill_launch_tokens(self) -> int:
        return int(PREFILL_TOKENS * self._weights_per_use)

    def expect(self, num_tokens: int, num_rows: int) -> None:
        num_weights = self._token_cost + self._logits_cost
        if not num_weights:
            return
        work = num_tokens * self._token_cost + num_rows * self._logits_cost
        seconds = num_weights / WEIGHTS_PER_S + work / MULTIPLICATIONS_PER_S
        threads = 1 if seconds < SINGLE_THREAD_S else self._threads
        if threads != self._threads_in_use:
            self._threads_in_use = threads
            torch.set_num_threads(threads)
            if self._library is not None:
                self._library.use_threads(threads)

    def drops_weights(self, sleep_level: int) -> bool:
        # At level 1 the weights move to host memory, where they are.
        return sleep_level > 1

    def end_warmup(self) -> None:
        retain_freed_memory(RETAINED_BYTES)

    def begin_warmup(self) -> None:
        retain_freed_memory(0)

    def close(self) -> None:
        if self.world.size > 1:
            leave()


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # numpy uses calloc, so pages that are never written cost nothing; torch.zeros writes them.
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    raw = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)


def use_cpu_kernels(model: nn.Module, library: Library | None) -> nn.Module:
    """Install faster kernels in the layers of a loaded bfloat16 model: kernels of `library` for
    linear layers and experts, and torch's operators for norms and for linear layers without a
    kernel of `library`. Returns the model to run: a CompiledDecoder, if `model` is a decoder that
    can be compiled and there is a `library`, or `model` itself."""
    # Routers are not packed: they are small, have any number of outputs, and may be in float32.
    routers = {
        gate for module in model.modules() if isinstance(module, MoE) for gate in module.gates
    }
    for module in list(model.modules()):
        if isinstance(module, RMSNorm):
            module.use_kernel(MirroredRMSNorm(module.weight))
        elif isinstance(module, LinearBase) and module not in routers:
            kernel = _pack(module, library)
            if kernel is not None:
                module.use_kernel(kernel)
        elif isinstance(module, Experts) and library is not None and not module.keeps_method:
            _pack_experts(module, library)
    # A compiled decoder needs all layers and all their experts on this rank.
    if (
        not isinstance(model, Decoder)
        or model.lm_head is None
        or model.stage.size > 1
        or any(isinstance(module, Experts) and module.is_distributed for module in model.modules())
    ):
        return model
    if model.group.size == 1:
        return model if library is None else CompiledDecoder(model, library)
    return _compiled_shard(model, library)


def _compiled_shard(model: Decoder, library: Library | None) -> nn.Module:
    """The compiled decoder, if all ranks have the library and share memory; else `model`."""
    has_library = Agreement(model.group).all_true(library is not None)
    if not has_library or library is None:
        return model
    sums = SharedSums(model.group)
    if sums.reserve(model.config.hidden_size):
        return CompiledDecoder(model, library, sums)
    logger.info("Layers run in separate calls, since the ranks share no memory")
    return model


def _pack_experts(experts: Experts, library: Library) -> None:
    w13: Stack
    w2: Stack
    if experts.quantized_weights is not None:
        w13, w2 = experts.quantized_weights
    else:
        assert experts.w13_weight is not None and experts.w2_weight is not None
        w13, w2 = experts.w13_weight.detach(), experts.w2_weight.detach()
    first = experts.first_expert if experts.is_distributed else None
    stacks = Stacks(w13, w2, experts.w13_bias, experts.applied_w2_bias, first)
    if has_experts_kernel(stacks, experts.activation_form):
        experts.replace_weights(PackedExperts(library, stacks, experts.activation_form))


def _pack(linear: LinearBase, library: Library | None) -> Kernel | None:
    """The fastest kernel for `linear`; None if the layer's own method is the fastest."""
    bias, quantized = linear.applied_bias, linear.quantized_weight
    if quantized is not None:
        if library is not None and has_kernel(quantized):
            return PackedLinear(library, quantized, bias)
        return quantized_linear(quantized, bias)
    assert linear.weight is not None
    weight = linear.weight.detach()
    if library is not None and has_kernel(weight):
        return PackedLinear(library, weight, bias)
    return packed_linear(weight, bias) if can_pack(weight.dtype, weight.device) else None


def _make(config: EngineConfig, ranks: Ranks, on_step: OnStep) -> CpuBackend:
    if config.cache.gpu_memory_utilization != DEFAULT_MEMORY_UTILIZATION and not ranks.rank:
        logger.info(
            "--gpu-memory-utilization has no effect on a CPU: --kv-cache-memory-bytes sets the "
            "size of the KV cache"
        )
    if config.offload.cpu_offload_gb:
        raise ConfigError(
            f"--cpu-offload-gb is {config.offload.cpu_offload_gb:g} and the device is cpu, whose "
            "weights are in host memory already: set it to 0"
        )
    folder = kernel_folder(config.cache_dir) if config.cpu_kernels == "auto" else None
    backend = CpuBackend(
        config.num_threads,
        folder,
        int8_activations=config.cpu_int8_activations,
        ranks=ranks,
        on_step=on_step,
    )
    if config.dtype == "bfloat16":
        # Before the weights are loaded: a compilation takes minutes.
        backend.open_kernels()
    return backend


BACKENDS = {"cpu": _make}
