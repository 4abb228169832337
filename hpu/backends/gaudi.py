"""GaudiBackend: a Gaudi card through the vendor's runtime (habana_frameworks), in any of the four
modes.

In lazy mode operations are collected until mark_step ends the segment, which becomes a recipe.
`_end_recipe` and `_mark_layers` end segments within a launch, for smaller recipes.
"""

import contextlib
import functools
import gc
import importlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from config.engine import SchedulerConfig
from config.errors import ConfigError, GaudiserveError, bytes_text
from config.execution import (
    EAGER,
    FAST_SOFTMAX,
    FP32_SOFTMAX,
    HPU_GRAPHS,
    LAZY,
    RUNTIME_DISTRIBUTION,
    SIDE_COPIES,
    TORCH_COMPILE,
    ExecutionConfig,
    ModeChoice,
)
from config.model.kv_cache_dtype import AUTO, ON_GAUDI
from config.model.model_config import ModelConfig
from hpu.backends.base import Backend, Captured, Function, FusibleModel
from hpu.backends.gaudi_copies import GaudiEvent, HostCopies
from hpu.backends.gaudi_copy_trials import CopyTrials
from hpu.backends.gaudi_experts import check_experts
from hpu.backends.gaudi_group import GaudiGroup
from hpu.backends.runtime_metrics import RuntimeMetrics
from hpu.bucketing.select import GAUDI_STRATEGY
from hpu.distributed.process_groups import SINGLE_RANK, ProcessGroups, Ranks, make_groups
from hpu.doctor.machine import distribution_version
from hpu.gaudi_devices import (
    GENERATIONS,
    OUT_OF_MEMORY,
    VENDOR_PACKAGE,
    has_kernel,
    max_experts,
    release_of,
)
from hpu.layers.embedding import ParallelLMHead
from hpu.layers.linear import QKVParallelLinear, split_products
from hpu.ops.kernels import Kernels, SliceSizes
from hpu.ops.products import Matmul, matmul_by_element, matmul_in_parts
from hpu.quantization.base import LinearMethod, MoEMethod
from hpu.quantization.inc import IncCompressor
from hpu.quantization.kv_cache import FLOATS, HpuFp8Format, KVCacheFormat, cast_format
from hpu.quantization.stored.fp8 import (
    Fp8BlockLinearMethod,
    Fp8BlockMoEMethod,
    Fp8LinearMethod,
    Fp8MoEMethod,
    Fp8Range,
    can_multiply,
    can_stay,
    has_blocks,
    is_weight_only,
)
from hpu.quantization.stored.int8 import (
    Int8LinearMethod,
    Int8MoEMethod,
    can_expand,
    can_expand_experts,
)
from hpu.quantization.stored.mxfp4 import Mxfp4Experts, NativeMxfp4MoEMethod
from hpu.quantization.stored.uint4 import (
    Uint4LinearMethod,
    Uint4MoEMethod,
    can_convert,
    can_convert_experts,
)
from hpu.quantization.stored.weights import StoredExperts, StoredWeight

logger = logging.getLogger(__name__)


MAX_SHAPES = 1 << 16
"""Limit on shapes per compiled function: more than the buckets of a usual table times the compiled
parts of a layer."""

ASYNCHRONOUS_BYTES = 1 << 20
"""Copies to the card below this size are staged before the call returns (the bridge's device.cpp
and stream.cpp)."""

KEEP_TENSOR_CACHE = ("Llava", "Qwen", "Roberta", "VipLlava", "XLMRoberta")
"""Prefixes of architectures whose graphs need the tensor cache (vllm-project/vllm-gaudi,
docs/configuration/env_variables.md, PT_HPUGRAPH_DISABLE_TENSOR_CACHE; no reason is given there)."""

COMPILE_FAILED = ("graph compile failed", "cpu fallback is not supported")
"""Parts of the error texts, in lower case, for a recipe that the compiler rejects and for a
captured operation that the card does not support. The status in the text, often 26, is generic: the
exceeded limit is not necessarily memory."""


def keeps_tensor_cache(config: ModelConfig) -> bool:
    """Whether the graphs of a model need the tensor cache, because of its text or its vision
    architecture."""
    architectures = [config.architecture]
    if config.vision is not None:
        architectures.append(config.vision.architecture)
    return any(name.startswith(KEEP_TENSOR_CACHE) for name in architectures)


class HpuGraph:
    """A function wrapped by the runtime, with a single cached graph, since its inputs have fixed
    shapes.

    With the tensor cache, a replay copies inputs into the captured inputs (the bridge's
    torch/hpu/graphs.py, copy_to), except captured inputs themselves. Without the tensor cache, a
    replay reads inputs in place if the capture matched them (tensors that are not views;
    habana_device/HPUGraph.cpp, replayV3), and intermediates are freed, so graphs share their
    memory. Every replay writes the same output tensors.
    """

    def __init__(
        self, graphed: Callable[..., Any], inputs: tuple[Any, ...], mark_step: Callable[[], None]
    ) -> None:
        self._graphed: Callable[..., Any] | None = graphed
        self._mark_step = mark_step
        self.replay(*inputs)

    def replay(self, *inputs: Any) -> Any:
        assert self._graphed is not None, "replay of a graph that was freed"
        # Launch the work that produces the inputs before the graph reads them.
        self._mark_step()
        outputs = self._graphed(*inputs)
        self._mark_step()
        return outputs

    def free(self) -> None:
        """Free the graph: the runtime drops its cache with the wrapped function."""
        self._graphed = None


class _Recipe(AbstractContextManager[None]):
    """Context whose end is the end of a recipe, unless an exception ends it."""

    def __init__(self, mark_step: Callable[[], None]) -> None:
        self._mark_step = mark_step

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not kind:
            self._mark_step()


def _regions(model: nn.Module) -> Iterator[nn.Module]:
    """Modules to compile separately: the layers of a model and the modules next to the layers,
    except the head, since `logits` is a separate region."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif any(isinstance(module, nn.ModuleList) for module in child.modules()):
            yield from _regions(child)
        elif not isinstance(child, ParallelLMHead):
            yield child


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """Facts of the card and its software that the runtime does not report."""

    driver: str = ""
    """Version of the driver; empty if unknown."""
    software: str = ""
    """Release of the runtime; empty: the release of the installed package."""
    multiplies_float32: bool = True
    """Whether the card multiplies float32 matrices."""
    explain: Callable[[str], str | None] = lambda text: None
    """Returns the meaning of an error text of the runtime, if it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardHooks:
    """Calls that an emulated card needs; no-ops for a real card."""

    on_warmup_begin: Callable[[], None] = lambda: None
    """Called before a warm-up that follows the first one."""
    on_warmup_end: Callable[[], None] = lambda: None
    on_close: Callable[[], None] = lambda: None
    """Called when the card is released."""


NO_FACTS = CardFacts()
NO_HOOKS = CardHooks()


class GaudiBackend(Backend):
    """The card of this process; the runtime assigns at most one card to a process.

    `choice` is the mode; the runtime's variables are already set for it. `guards_off`: compiled
    code checks no guards after warm-up, and a new shape is an error. Raises ConfigError if the
    runtime is unusable.
    """

    name = "hpu"
    default_block_size = 128
    default_strategy = GAUDI_STRATEGY
    default_dtype = torch.bfloat16
    fast_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    index_dtype = torch.int32
    compiles = True
    reads_contiguously = True
    shares_host_memory = False

    def __init__(
        self,
        execution: ExecutionConfig,
        choice: ModeChoice,
        *,
        seed: int = 0,
        ranks: Ranks = SINGLE_RANK,
        guards_off: bool = False,
        facts: CardFacts = NO_FACTS,
        hooks: CardHooks = NO_HOOKS,
    ) -> None:
        self.driver = facts.driver
        self.software = facts.software or distribution_version(RUNTIME_DISTRIBUTION) or ""
        self._execution = execution
        self._mode = choice.mode
        self._facts = facts
        self._hooks = hooks
        self._guards_off = guards_off
        self._only_compiles = False
        """Whether recipes are compiled and not launched."""
        self._disables_tensor_cache = True
        self._graphs: weakref.WeakSet[HpuGraph] = weakref.WeakSet()
        try:
            self._htorch = importlib.import_module(VENDOR_PACKAGE)
            self._htcore = importlib.import_module(f"{VENDOR_PACKAGE}.core")
            self._hpu = importlib.import_module(f"{VENDOR_PACKAGE}.hpu")
            metrics = importlib.import_module(f"{VENDOR_PACKAGE}.hpu.metrics")
            self._check_mode(choice)
            # The runtime acquires the card that belongs to the rank.
            self._group = GaudiGroup(ranks)
            self.world = self._group.world
            self.device = torch.device("hpu", self._acquire())
            self._group.check(self.device)
        except (ImportError, AssertionError, RuntimeError) as error:
            raise ConfigError(self._explained(error)) from error
        self._was_disabled = torch._dynamo.config.disable
        if choice.is_lazy:
            # The vendor's plug-in disables dynamo too: torch's tracer does not support lazy
            # tensors.
            torch._dynamo.config.disable = True
        # The bridge registers no scaled_dot_product_attention (its hpu_op.yaml), so torch composes
        # it of plain operators, and by default converts 16-bit operands to float32, which is slow,
        # and which Gaudi 2B, 2C and 2D do not multiply (_scaled_dot_product_attention_math in
        # torch's attention.cpp; huggingface/optimum-habana sets this for --sdp_on_bf16).
        self._had_narrow_attention = torch._C._get_math_sdp_allow_fp16_bf16_reduction()
        torch._C._set_math_sdp_allow_fp16_bf16_reduction(True)
        self.recipe = _Recipe(self.mark_step)
        self.captures = self._mode == HPU_GRAPHS
        self._chooses_copies = execution.host_copies == "auto"
        """Whether `prepare` still has to choose the kind of host copies."""
        self._copies = HostCopies(
            self._hpu, SIDE_COPIES if self._chooses_copies else execution.host_copies
        )
        self._hpu.manual_seed(seed)
        self.runtime_metrics = RuntimeMetrics(metrics)
        self.card = str(self._hpu.get_device_name())
        logger.info(
            "HPU %s: mode %s, %s",
            self.card,
            choice.mode,
            bytes_text(self.memory()[1]),
        )

    @property
    def host_copies(self) -> str:
        """How results are copied to the host: a value of --host-copies other than auto."""
        return self._copies.kind

    def _check_mode(self, choice: ModeChoice) -> None:
        internal = importlib.import_module(f"{VENDOR_PACKAGE}.utils.internal")
        if bool(internal.is_lazy()) != choice.is_lazy:
            raise ConfigError(
                f"mode {choice.mode} needs PT_HPU_LAZY_MODE={int(choice.is_lazy)}, but the runtime "
                f"was loaded before with {int(internal.is_lazy())}: set the variable before the "
                "program starts"
            )

    def _acquire(self) -> int:
        """Acquire the card. The runtime acquires it at the first use. Returns the device index."""
        if not self._hpu.is_available():
            raise ConfigError(
                "no card responds: check the driver and the runtime with `gaudiserve doctor`"
            )
        # Run an operation: with a driver of another release, allocation may succeed and the first
        # operation fails.
        two = torch.zeros(1, device="hpu") + 2
        self._htcore.mark_step()
        self._hpu.synchronize()
        if (found := float(two.cpu())) != 2:
            raise ConfigError(
                f"the card computes 0 + 2 = {found:g}: check the card with `gaudiserve doctor`"
            )
        return int(self._hpu.current_device())

    @property
    def _float32_matmul(self) -> Matmul:
        if self._facts.multiplies_float32:
            return torch.matmul
        writes_float32 = self._has_kernel("matmul.float32_out", self._generation())
        return matmul_in_parts if writes_float32 else matmul_by_element

    def _make_kernels(self, model: FusibleModel, patcher: IncCompressor | None) -> Kernels:
        """Kernels for `model`. Settings override these defaults, which follow the vendor's plug-in
        for vLLM (vllm_gaudi/extension/features.py):

        * Softmax in float32 for Qwen2, and for float16, in which scores of one request may overflow
          and reach other requests of the batch.

        * block_softmax_adjustment where it is known to exist, except for Qwen2, and only for
          bfloat16: the bridge's tests skip float32 in lazy and compile mode because of its
          accuracy.

        * The kernel block_softmax is not used.

        * No matmul writes float32 if `patcher` replaces it: the compressor's matmul takes no result
          tensor up to release 3.8 (PatchedMatmul in its helper_modules.py).
        """
        if not self._facts.multiplies_float32 and model.dtype != torch.bfloat16:
            raise ConfigError(
                f"this revision of the card ({self.card}) multiplies no float32 matrices, and a "
                f"model in {str(model.dtype).removeprefix('torch.')} needs them: use --dtype "
                "bfloat16"
            )
        card = self._generation()
        # Imported here because the module imports the vendor's kernels.
        module = importlib.import_module("hpu.ops.gaudi")
        is_qwen2 = model.config.architecture.startswith("Qwen2")
        exists = self._has_kernel("block_softmax_adjustment", card)
        execution = self._execution
        sizes = execution.slice_sizes
        form = module.GaudiKernels if execution.fused_norm_rope else module.PlainNormKernels
        softmax, block_softmax = execution.softmax, execution.block_softmax
        if softmax == AUTO:
            overflows = model.dtype == torch.float16
            softmax = FP32_SOFTMAX if is_qwen2 or overflows else FAST_SOFTMAX
        if block_softmax == AUTO:
            suits = softmax == FAST_SOFTMAX and model.dtype == torch.bfloat16
            uses_kernel = exists and execution.fused_block_softmax and suits
            block_softmax = module.ADJUSTMENT if uses_kernel else module.INDEX_REDUCE
        kernels = form(
            fused_sdpa=execution.fused_sdpa and not execution.flex_attention,
            softmax_mode=softmax,
            block_softmax=block_softmax,
            fused_experts=execution.fused_experts,
            max_experts=max_experts(release_of(self.software)),
            slices=None if sizes is None else SliceSizes(*sizes),
            end_slice=self._end_recipe,
            products=module.ProductForms(
                matmul=self._float32_matmul,
                write_float32=not patcher and self._has_kernel("matmul.float32_out", card),
            ),
        )
        if execution.flex_attention:
            return cast(Kernels, self._with_flex_attention(kernels))
        return cast(Kernels, kernels)

    def _with_flex_attention(self, kernels: Any) -> Any:
        """`kernels` with torch's flex attention for prompts. Raises ConfigError in a lazy mode: the
        plug-in supports flex attention with torch.compile only."""
        if self._mode in (HPU_GRAPHS, LAZY):
            raise ConfigError(
                f"--prompt-use-flex-attention is on and the execution mode is {self._mode}: flex "
                f"attention needs --execution-mode {TORCH_COMPILE}"
            )
        return importlib.import_module("hpu.ops.gaudi_flex").FlexKernels(kernels)

    def _generation(self) -> str | None:
        """Generation of the card, a key of GENERATIONS; None if unknown."""
        experimental = importlib.import_module(f"{VENDOR_PACKAGE}.utils.experimental")
        kinds = experimental.synDeviceType
        found = experimental._get_device_type()
        return {kinds.synDeviceGaudi2: "gaudi2", kinds.synDeviceGaudi3: "gaudi3"}.get(found)

    def _has_kernel(self, kernel: str, card: str | None) -> bool:
        return card is not None and bool(has_kernel(kernel, card, release_of(self.software)))

    def linear_method(self, weight: StoredWeight, dtype: torch.dtype) -> LinearMethod | None:
        card = self._generation()
        if dtype != torch.bfloat16 or card is None:
            return None
        if self._expands_fp8(weight):
            return Fp8BlockLinearMethod(weight, self._fp8_range(card))
        if can_expand(weight):
            return Int8LinearMethod(weight)
        if is_weight_only(weight) or not self._execution.quantized_kernels:
            return None
        if weight.scheme.is_float:
            return Fp8LinearMethod(weight, self._fp8_range(card))
        takes_groups = self._has_kernel("convert_from_uint4.g_idx", card)
        # The bridge's tests list the operator as unsupported in eager mode.
        if self._mode == EAGER or not can_convert(weight, takes_groups=takes_groups):
            return None
        return Uint4LinearMethod(weight)

    def moe_method(
        self, experts: StoredExperts | Mxfp4Experts, dtype: torch.dtype
    ) -> MoEMethod | None:
        card = self._generation()
        # The bridge's tests list the operators for quantized experts as unsupported in eager mode.
        if dtype != torch.bfloat16 or card is None or self._mode == EAGER:
            return None
        if not self._execution.fused_experts:
            return None
        if isinstance(experts, Mxfp4Experts):
            return self._mxfp4_method(experts)
        weights = [weight for _, weight in experts.named_weights]
        if can_multiply(experts) and all(self._expands_fp8(weight) for weight in weights):
            return Fp8BlockMoEMethod(experts, self._fp8_range(card), self._end_recipe)
        if can_expand_experts(experts):
            return Int8MoEMethod(experts, self._end_recipe)
        is_plain = any(is_weight_only(weight) for weight in weights)
        if is_plain or not self._execution.quantized_kernels:
            return None
        if can_multiply(experts) and self._has_kernel("mixture_of_experts.fp8_fused_weights", card):
            return Fp8MoEMethod(experts, self._fp8_range(card))
        takes_groups = self._has_kernel("convert_from_uint4.g_idx", card)
        if can_convert_experts(experts, takes_groups=takes_groups):
            return Uint4MoEMethod(experts, self._end_recipe)
        return None

    def _fp8_range(self, card: str) -> Fp8Range:
        return Fp8Range(GENERATIONS[card].fp8_max, self._execution.convert_to_fp8uz)

    def _mxfp4_method(self, experts: Mxfp4Experts) -> MoEMethod | None:
        """The method for experts that stay in MXFP4; None without --native-mxfp4, and for experts
        with partial blocks. Raises ConfigError if the runtime has no operator for it."""
        if not (self._execution.native_mxfp4 and experts.has_whole_blocks):
            return None
        overload = "bias_mxfp4_fused_weights"
        if not hasattr(torch.ops.hpu.mixture_of_experts, overload):
            raise ConfigError(
                f"--native-mxfp4 is on, and the runtime {self.software} has no operator "
                f"mixture_of_experts.{overload}: turn it off, or use a newer release"
            )
        return NativeMxfp4MoEMethod(experts)

    def _expands_fp8(self, weight: StoredWeight) -> bool:
        """Whether each launch expands `weight` to the activations' dtype and multiplies in that
        dtype."""
        keeps_blocks = has_blocks(weight) and not self._execution.force_channel_fp8
        return can_stay(weight) and (keeps_blocks or is_weight_only(weight))

    @property
    def _end_recipe(self) -> Callable[[], None]:
        """Callback that ends the recipe after a part of a layer. In the lazy modes each part is a
        separate recipe, as in the vendor's plug-in: equal parts share a recipe, and a recipe
        needs memory for a single part. In other modes it does nothing."""
        return self.mark_step if self._mode in (HPU_GRAPHS, LAZY) else lambda: None

    def kv_cache_format(self, kv_cache_dtype: str, dtype: torch.dtype) -> KVCacheFormat | None:
        if kv_cache_dtype == AUTO:
            return None
        if kv_cache_dtype in FLOATS:
            return cast_format(kv_cache_dtype, dtype)
        card = self._generation()
        if kv_cache_dtype not in ON_GAUDI or card is None:
            raise ConfigError(
                f"--kv-cache-dtype is {kv_cache_dtype} and the device is {self.name}, which "
                f"supports {', '.join(ON_GAUDI)}"
            )
        return HpuFp8Format(kv_cache_dtype, GENERATIONS[card].fp8_max)

    def prompts_per_row(self, scheduler: SchedulerConfig) -> int:
        # The fused attention supports such rows.
        return scheduler.prefill_batch() if scheduler.merged_prefill else 1

    def memory(self) -> tuple[int, int]:
        self.synchronize()
        free, total = self._hpu.mem_get_info()
        return int(free), int(total)

    def peak_memory(self) -> int:
        self.synchronize()
        # A reset sets the runtime's peak to 0 until the next allocation (the bridge's
        # CoalescedStringentPoolAllocator.cpp).
        return int(max(self._hpu.max_memory_allocated(), self._hpu.memory_allocated()))

    def reset_peak(self) -> None:
        self.synchronize()
        self._hpu.reset_peak_memory_stats()

    def is_out_of_memory(self, error: Exception) -> bool:
        text = str(error).lower()
        return isinstance(error, RuntimeError) and any(word in text for word in OUT_OF_MEMORY)

    def is_compile_failure(self, error: Exception) -> bool:
        text = str(error).lower()
        return isinstance(error, RuntimeError) and any(word in text for word in COMPILE_FAILED)

    def advice(self, error: Exception) -> str:
        # The server's own errors already contain advice.
        if isinstance(error, GaudiserveError):
            return ""
        parts = [self._facts.explain(str(error)) or ""]
        if self._mode in (HPU_GRAPHS, LAZY):
            parts.append(
                f"the mode is {self._mode}, and lazy mode is the vendor's legacy path: try "
                "--execution-mode torch-compile"
            )
        return "; ".join(filter(None, parts))

    def synchronize(self) -> None:
        self._htcore.mark_step()
        if self._only_compiles:
            # Nothing was launched. The runtime continues to compile while the host traces the next
            # launch.
            return
        self._hpu.synchronize()
        self._copies.wait_all()

    def mark_step(self) -> None:
        """End the current recipe."""
        self._htcore.mark_step()

    def make_groups(self, *, tensor: int, pipeline: int, data: int) -> ProcessGroups:
        return make_groups(tensor=tensor, pipeline=pipeline, data=data, mark_step=self.mark_step)

    def event(self) -> GaudiEvent:
        self.mark_step()
        return self._copies.event()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def host_tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        # Not pinned, as in the vendor's plug-in for vLLM.
        return torch.zeros(size, dtype=dtype)

    def input_tensors(self, size: int, dtype: torch.dtype, count: int) -> Iterator[Tensor]:
        # With a single tensor, a bucket that runs in every step could upload only between launches:
        # a launch registers itself as the producer of all its inputs' storages, and a copy from the
        # host waits for the producer of its target (the bridge's hpu_habana_cache.cpp, Launch, and
        # device.cpp, copy_data_to_device).
        return (self.zeros((size,), dtype) for _ in range(count))

    def capture_input(self, uploaded: Tensor) -> Tensor:
        # A private copy: with the tensor cache, the runtime copies each replay's inputs to the
        # captured tensors, which must not alias the target of an upload.
        return uploaded.clone()

    def to_host(self, tensor: Tensor) -> Tensor:
        # Launch the work that produces the tensor before another stream waits for it.
        self.mark_step()
        if self._only_compiles:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return self._copies.start(tensor)

    def upload(self, target: Tensor, source: Tensor) -> None:
        # From ASYNCHRONOUS_BYTES on, a thread of the runtime reads the source after the call
        # returns, and an event recorded now may not include the copy: make the copy blocking.
        is_small = source.numel() * source.element_size() < ASYNCHRONOUS_BYTES
        target.copy_(source, non_blocking=is_small)

    def capture(self, function: Captured, inputs: tuple[Any, ...]) -> HpuGraph:
        return self.capture_function(function, inputs)

    def capture_function(
        self,
        function: Captured,
        inputs: tuple[Any, ...],
        *,
        frees_intermediates: bool = False,
    ) -> HpuGraph:
        """Record `function(*inputs)`. The inputs must be tensors that are not views: the base of a
        view would be a constant of the graph."""
        graphed = self._hpu.wrap_in_hpu_graph_func(
            function, disable_tensor_cache=frees_intermediates or self._disables_tensor_cache
        )
        try:
            graph = HpuGraph(graphed, inputs, self._htcore.mark_step)
            self._graphs.add(graph)
            return graph
        except RuntimeError as error:
            if not (self.is_out_of_memory(error) or self.is_compile_failure(error)):
                raise
            # Drop the traceback, whose frames hold the unfinished graph and the tensors of the
            # capture. The process is in capture mode until that graph is destroyed.
            failure = error.with_traceback(None)
            failure.__context__ = None
        self._leave_dry_run(str(failure))
        raise failure

    def compiled(self, function: Function) -> Function:
        if self._mode == TORCH_COMPILE:
            return cast(Function, torch.compile(function, **self._compile_options()))
        if self._mode == EAGER:
            return function

        @functools.wraps(function)
        def run(*inputs: Any) -> Any:
            outputs = function(*inputs)
            self._htcore.mark_step()
            return outputs

        return cast(Function, run)

    def _leave_dry_run(self, why: str) -> None:
        """Make the runtime execute launches again after a capture that failed because of `why`.

        A capture without tensor cache is a dry run, and aborting the capture does not end the dry
        run: launches do nothing until a capture succeeds (HabanaAI/gaudi-pytorch-bridge,
        backend/habana_device/HPUGraph.cpp). Raises ConfigError if another capture fails, or if
        launches still do nothing after it.
        """
        # Free what the failed capture left: a full card may have no room for another graph. The
        # runtime has no call that empties its caches; freed memory returns to the runtime.
        gc.collect()
        self._htcore.mark_step()
        self._hpu.synchronize()
        try:
            # Created on the host: creating it on the device would be a launch.
            tensor = torch.ones(1).to(self.device)
            add = self._hpu.wrap_in_hpu_graph_func(lambda x: x + 1, disable_tensor_cache=True)
            add(tensor)
            found = float((add(tensor) * 3).cpu())
        except RuntimeError as error:
            advice = (
                "start again with fewer or smaller buckets, or with --execution-mode torch-compile"
            )
            if self.is_out_of_memory(error):
                advice = "lower --gpu-memory-utilization, which leaves more to graphs and launches"
            raise ConfigError(
                f"every graph capture after a failed capture fails ({why}): {error}; {advice}"
            ) from error
        if found != 6:
            raise ConfigError(
                f"the runtime executes nothing after a failed capture ({why}; 1 + 1, times 3, gave "
                f"{found:g}): start again with fewer or smaller buckets, or with --execution-mode "
                "torch-compile"
            )

    def begin_load(self, patcher: IncCompressor | None = None) -> None:
        if patcher is not None:
            self._call_core("hpu_inference_set_env", "hpu_set_env")

    def adapt(self, model: nn.Module) -> None:
        if not self._facts.multiplies_float32:
            split_products(model, self._float32_matmul)

    def prepare(self, model: nn.Module, patcher: IncCompressor | None = None) -> nn.Module:
        self.synchronize()
        if self._chooses_copies:
            self._copies.kind = CopyTrials(
                functools.partial(HostCopies, self._hpu),
                self.mark_step,
                functools.partial(self._hpu.set_stream, self._hpu.default_stream()),
            ).choose()
            self._chooses_copies = False
        self.adapt(model)
        if isinstance(model, FusibleModel):
            splits = self._execution.split_qkv and self._can_split(model, patcher)
            model.use_kernels(self._make_kernels(model, patcher), split_qkv=splits)
            check_experts(model.layers, self.compiled, self.is_compile_failure)
            if keeps_tensor_cache(model.config):
                self._disables_tensor_cache = False
            if patcher is not None:
                patcher.patch(model)
                model.to(self.device)
                self._htcore.mark_step()
                # Same order as load_model in the vendor's plug-in for vLLM.
                if not self._execution.disable_mark_scales_as_const:
                    names = ("hpu_inference_initialize", "hpu_initialize")
                    self._call_core(*names, model, mark_only_scales_as_const=True)
            if self._mode in (HPU_GRAPHS, LAZY):
                self._mark_layers(model.layers)
        if self._mode == TORCH_COMPILE:
            self._compile(model)
        return model

    def _call_core(self, name: str, old_name: str, *args: object, **options: object) -> None:
        """Call the function `name` of the vendor's package, or `old_name` in a release without
        `name`: 1.19 lacks hpu_inference_set_env, and later releases announce the removal of the old
        names (HabanaAI/gaudi-pytorch-bridge, torch/core/quantization.py)."""
        core = self._htcore
        getattr(core, name if hasattr(core, name) else old_name)(*args, **options)

    def _can_split(self, model: nn.Module, patcher: IncCompressor | None) -> bool:
        """Whether --split-qkv applies to `model`: not with a `patcher`, which replaces merged
        layers. Logs how many layers keep a merged matmul."""
        projections = [item for item in model.modules() if isinstance(item, QKVParallelLinear)]
        merged = [item for item in projections if patcher or not isinstance(item.weight, Tensor)]
        if merged:
            logger.warning(
                "--split-qkv has no effect on %d of %d layers: the weights of their queries, "
                "keys and values are quantized and stay in one matrix multiplication",
                len(merged),
                len(projections),
            )
        return not patcher

    def _mark_layers(self, layers: Iterable[nn.Module]) -> None:
        """End the recipe after every `layers_per_recipe` layers: smaller recipes compile faster,
        and equal layers share them."""

        def mark(module: nn.Module, args: object, output: object) -> None:
            self._htcore.mark_step()

        every = self._execution.layers_per_recipe
        for number, layer in enumerate(layers, start=1):
            if number % every == 0:
                layer.register_forward_hook(mark)

    def _compile_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "backend": "hpu_backend",
            "fullgraph": self._execution.compile_fullgraph,
        }
        # The vendor's plug-in for vLLM does this too (vllm_gaudi/utils.py): torch may trace with
        # symbolic shapes, but the backend compiles static shapes; `dynamic=True` is never passed.
        if self._execution.compile_dynamic_shapes:
            options["options"] = {"force_static_compile": True}
        else:
            options["dynamic"] = False
        return options

    def _compile(self, model: nn.Module) -> None:
        options = self._compile_options()
        parts: list[nn.Module] = [model]
        if self._execution.regional_compilation:
            parts = list(_regions(model))
        # torch stops compiling a function above this number of shapes.
        limits = torch._dynamo.config
        for name in ("cache_size_limit", "accumulated_cache_size_limit"):
            setattr(limits, name, max(getattr(limits, name), MAX_SHAPES))
        for part in parts:
            if type(part).__module__.startswith(nn.__name__):
                # Module.compile has no effect on torch's own modules: the tracer skips their
                # frames, and wraps only a function that is not Module._call_impl.
                part.forward = torch.compile(part.forward, **options)
            else:
                part.compile(**options)

    @contextlib.contextmanager
    def compile_only(self) -> Iterator[bool]:
        """PT_COMPILE_ONLY_MODE, as in the warm-up of vLLM's Gaudi plug-in (warmup_model in
        vllm_gaudi/v1/worker/hpu_model_runner.py): the bridge compiles a recipe, and skips synLaunch
        (its graph.cpp). Yields False in the modes eager and lazy, or if the runtime does not know
        this variable."""
        if self._mode not in (HPU_GRAPHS, TORCH_COMPILE):
            yield False
            return
        config = importlib.import_module(f"{VENDOR_PACKAGE}.internal.bridge_config")
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(config.env_setting("PT_COMPILE_ONLY_MODE", True))
            except KeyError:
                logger.warning("The runtime has no PT_COMPILE_ONLY_MODE: warm-up takes longer")
                yield False
                return
            self._only_compiles = True
            try:
                yield True
            finally:
                self._only_compiles = False
                # Every recipe must be compiled before the mode ends.
                self.synchronize()

    def end_warmup(self) -> None:
        if self._guards_off and self._mode == TORCH_COMPILE:
            torch.compiler.set_stance("fail_on_recompile", skip_guard_eval_unsafe=True)
        self._hooks.on_warmup_end()

    def begin_warmup(self) -> None:
        self._free_graphs()
        self._hooks.on_warmup_begin()

    def _free_graphs(self) -> None:
        for graph in list(self._graphs):
            graph.free()
        if self._guards_off:
            torch.compiler.set_stance("default")

    def close(self) -> None:
        self._free_graphs()
        self._group.leave()
        torch._dynamo.config.disable = self._was_disabled
        torch._C._set_math_sdp_allow_fp16_bf16_reduction(self._had_narrow_attention)
        self._hooks.on_close()

    def _explained(self, error: Exception) -> str:
        text = str(error)
        meaning = self._facts.explain(text)
        return f"the HPU cannot be used: {meaning or text}"
