"""CudaBackend: an NVIDIA GPU, for development without a Gaudi. Launches are padded to buckets and,
unless eager mode is enforced, replayed as graphs."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from config.engine import EngineConfig
from config.errors import ConfigError, bytes_text
from config.progress import OnStep
from hpu.backends.base import Backend, Captured, FusibleModel
from hpu.distributed.process_groups import SINGLE_RANK, Ranks, join, leave
from hpu.ops.torch_kernels import TorchKernels
from hpu.quantization.inc import IncCompressor

logger = logging.getLogger(__name__)

BFLOAT16_CAPABILITY = (8, 0)
"""Lowest compute capability with bfloat16 matmuls in hardware (Ampere)."""

WARM_RUNS = 2
"""Runs before a capture. The first run loads kernels and allocates matmul workspaces, which is not
allowed during a capture; the second run repeats it with everything in place."""


class CudaEvent:
    """A point in a stream, with the device time at which it was reached."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # theirs
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make later work of `stream` wait for this point."""
        stream.wait_event(self._event)

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]  # theirs

    def seconds_since(self, earlier: "CudaEvent") -> float:
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000


class CudaGraph:
    """A captured graph with its input and output tensors. The tensors must live as long as the
    graph: a replay uses their addresses."""

    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: tuple[Any, ...], outputs: Any) -> None:
        self._graph = graph
        self._inputs = inputs
        self._outputs = outputs

    def replay(self, *inputs: Any) -> Any:
        self._graph.replay()
        return self._outputs


class CudaBackend(Backend):
    """The GPU of this rank among the GPUs in CUDA_VISIBLE_DEVICES; ranks communicate over NCCL.

    All work runs on the current stream, in the order of submission. Only captures with their
    warm-up runs, and `upload_beside`, use side streams, which the current stream waits for.

    All graphs share one memory pool: a replay reads nothing from the pool that it has not written,
    and replays do not overlap. A graph's outputs are therefore valid until the next replay of any
    graph. Raises ConfigError without a usable GPU.
    """

    name = "cuda"
    card = driver = ""
    software = torch.version.cuda or ""
    # The block size of a Gaudi.
    default_block_size = 128
    default_strategy = "exponential"
    compiles = False
    reads_contiguously = False
    shares_host_memory = False

    def __init__(self, ranks: Ranks = SINGLE_RANK, *, captures: bool = True) -> None:
        missing = missing_cuda(
            torch.__version__, torch.version.cuda, has_device=torch.cuda.is_available()
        )
        if missing is not None:
            raise ConfigError(missing)
        if ranks.device_index >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {ranks.rank} needs GPU {ranks.device_index}, the number of visible GPUs is "
                f"{torch.cuda.device_count()}"
            )
        self.captures = captures
        self.device = torch.device("cuda", ranks.device_index)
        # index_copy_, which writes the KV cache, accepts only int64 indices on CUDA.
        self.index_dtype = torch.int64
        torch.cuda.set_device(self.device)
        capability = torch.cuda.get_device_capability(self.device)
        self.fast_dtypes: tuple[torch.dtype, ...] = (torch.float16,)
        if capability >= BFLOAT16_CAPABILITY:
            self.fast_dtypes = (torch.bfloat16, torch.float16)
        self.default_dtype = self.fast_dtypes[0]
        self.world = join("nccl", ranks)
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # theirs
        self._uploads = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # theirs
        self._pool = torch.cuda.graph_pool_handle()
        free, total = torch.cuda.mem_get_info(self.device)
        logger.info(
            "CUDA: %s, compute capability %d.%d, %s of %s free",
            torch.cuda.get_device_name(self.device),
            *capability,
            bytes_text(free),
            bytes_text(total),
        )

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, after all work is done and the allocator's cache is freed. Memory of
        other processes counts as used."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)

    def peak_memory(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def is_out_of_memory(self, error: Exception) -> bool:
        # A capture that runs out of memory may raise another error, whose context is the
        # out-of-memory error.
        found: BaseException | None = error
        while found is not None:
            if isinstance(found, torch.OutOfMemoryError):
                return True
            found = found.__context__
        return False

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def event(self) -> CudaEvent:
        return CudaEvent(torch.cuda.current_stream(self.device))

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        # Pinned: a copy into pageable memory makes the host wait for the device.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def upload(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def upload_beside(self, copies: Sequence[tuple[Tensor, Tensor]], after: CudaEvent) -> None:
        after.hold(self._uploads)
        with torch.cuda.stream(self._uploads):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        torch.cuda.current_stream(self.device).wait_stream(self._uploads)

    def capture(self, function: Captured, inputs: tuple[Any, ...]) -> CudaGraph:
        current = torch.cuda.current_stream(self.device)
        self._side.wait_stream(current)
        try:
            with torch.cuda.stream(self._side):
                for _ in range(WARM_RUNS):
                    function(*inputs)
            graph = torch.cuda.CUDAGraph()
            # thread_local: only calls of this thread invalidate the capture; other threads may wait
            # for events.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
            ):
                outputs = function(*inputs)
        finally:
            # A failed capture may leave its stream as the current one.
            torch.cuda.set_stream(current)
            current.wait_stream(self._side)
        return CudaGraph(graph, inputs, outputs)

    def prepare(
        self, model: torch.nn.Module, patcher: IncCompressor | None = None
    ) -> torch.nn.Module:
        if isinstance(model, FusibleModel):
            model.use_kernels(TorchKernels())
        return model

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        if self.world.size > 1:
            leave()


def missing_cuda(version: str, built_for: str | None, has_device: bool) -> str | None:
    """Reason why torch `version`, built for CUDA `built_for`, cannot use a GPU; None if it can."""
    if built_for is None:
        return (
            f"device 'cuda' needs a torch built with CUDA, and torch {version} is not: install a "
            "CUDA build, or use --device cpu"
        )
    if not has_device:
        return (
            f"device 'cuda': torch {version} is built for CUDA {built_for} and sees 0 GPUs: check "
            "the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    return None


def _make(config: EngineConfig, ranks: Ranks, on_step: OnStep) -> CudaBackend:
    if (method := config.speculation.choose()) is not None:
        raise ConfigError(
            f"--speculative-config names the method {method.method}, and the device is cuda, "
            "drafts are verified on hpu and cpu only: leave --speculative-config out"
        )
    return CudaBackend(ranks, captures=not config.enforce_eager)


BACKENDS = {"cuda": _make}
