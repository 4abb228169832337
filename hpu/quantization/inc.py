"""FP8 with Intel Neural Compressor (INC), which replaces modules of a loaded model by modules that
measure, or that quantize with earlier measurements.

The attributes that INC reads from linear layers, and the return values of its modules:
Patched*Linear in _quant_common/helper_modules.py of fp8_quant in intel/neural-compressor. The steps
follow the order of load_model in vllm_gaudi/v1/worker/hpu_model_runner.py of
vllm-project/vllm-gaudi.
"""

import importlib
import logging
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any, cast
from zipfile import BadZipFile

from torch import Tensor, nn

from config.errors import CheckpointError, ConfigError
from config.model.quantization.inc import PACKAGE, QuantConfig
from hpu.distributed.process_groups import ProcessGroup, alone
from hpu.layers.embedding import ParallelLMHead
from hpu.layers.linear import LinearBase
from hpu.layers.moe import Experts
from hpu.quantization.base import (
    ExpertsShards,
    LinearLayer,
    LinearMethod,
    LinearShards,
    MoEMethod,
)
from hpu.quantization.unquantized import HostLinearMethod, HostMoEMethod

logger = logging.getLogger(__name__)

QUANTIZATION = "neural_compressor.torch.quantization"
COLLECTIVES = "neural_compressor.torch.algorithms.fp8_quant._core.external_func_impl"

REFUSALS = (AssertionError, EOFError, KeyError, OSError, UnpicklingError, ValueError, BadZipFile)
"""Exceptions that INC raises for a wrong configuration and for files that it did not write."""
NEVER_CALLED = {"softmax"}
"""Attention modules that are called only without fused attention."""
PATCHED_CACHE = "PatchedVLLMKVCache"
UNMEASURED = "PatchedUnmeasuredModule"


class IncLinearMethod(HostLinearMethod):
    """Loads the weight into host memory, from which INC moves it to the device. Each layer has its
    own instance, because INC may replace its `apply`."""

    def apply(self, layer: LinearLayer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().apply(layer, x, bias)


class IncScheme:
    """Scheme for all linear layers and experts; the INC configuration lists the modules to skip."""

    def linear_method(self, weight: LinearShards) -> LinearMethod:
        return IncLinearMethod()

    def moe_method(self, experts: ExpertsShards) -> MoEMethod:
        return HostMoEMethod()


class IncCompressor:
    """Replaces modules of a model by modules of INC that measure or quantize. Raises ConfigError
    and CheckpointError."""

    def __init__(self, config: QuantConfig, group: ProcessGroup) -> None:
        """Create before the model is loaded. `group`: the tensor-parallel ranks."""
        self.config = config
        self._group = group
        try:
            self._inc = importlib.import_module(QUANTIZATION)
            collectives = importlib.import_module(COLLECTIVES)
        except ImportError as error:
            raise ConfigError(
                f"quantization is inc, and Intel Neural Compressor is not usable here ({error}): "
                f"pip install {PACKAGE}"
            ) from error
        # By default INC calls the collectives of vLLM.
        vars(collectives).update(
            tensor_model_parallel_all_reduce=group.all_reduce,
            tensor_model_parallel_all_gather=group.all_gather,
        )

    @property
    def weight_width(self) -> int:
        """Bytes per weight of a patched layer."""
        return 2 if self.config.measures else 1

    def patch(self, model: nn.Module) -> None:
        """Patch the model. Must be called once, after the model is loaded and uses the device's
        kernels, and before anything is compiled or captured."""
        originals = _prepare_linears(model)
        for module in model.modules():
            if isinstance(module, Experts) and module.moe_op is not None:
                # The views in moe_op keep each expert's memory until INC has moved the expert.
                module.replace_weights(module.moe_op)
        try:
            config = self._inc.FP8Config.from_json_file(self.config.path)
            with alone():
                (self._inc.prepare if self.config.measures else self._inc.convert)(model, config)
        except REFUSALS as error:
            raise CheckpointError(
                f"Intel Neural Compressor cannot use {self.config.path}, or its files at "
                f"{self.config.dump_stats_path}*: {error}"
            ) from error
        for original, paths in originals.items():
            _adapt(model, original, paths)
        if not self.config.measures:
            for module in model.modules():
                if type(module).__name__ == PATCHED_CACHE:
                    _write_alone(module)
        self._check(model)

    def finish(self, model: nn.Module) -> None:
        """Write the measurements to files, if this compressor measures. Must be called after all
        launches."""
        if self.config.measures:
            self._inc.finalize_calibration(model)
            file = self.config.measure_file(self._group.rank, self._group.size)
            logger.info("Measurements: written to %s", file)

    def quantizes_cache(self, model: nn.Module) -> bool:
        """Whether a patched model has an FP8 KV cache."""
        has_cache = any(type(module).__name__ == PATCHED_CACHE for module in model.modules())
        return has_cache and not self.config.measures

    def _check(self, model: nn.Module) -> None:
        """Raise CheckpointError if a module that is called in launches has no measurements."""
        unmeasured = [
            path
            for path, module in model.named_modules()
            if type(module).__name__ == UNMEASURED and path.rpartition(".")[2] not in NEVER_CALLED
        ]
        if unmeasured:
            file = self.config.measure_file(self._group.rank, self._group.size)
            raise CheckpointError(
                f"{file} has no measurements of {len(unmeasured)} modules of the model, the first "
                f"is {unmeasured[0]}: measure this model, with the same number of ranks"
            )


def _prepare_linears(model: nn.Module) -> dict[LinearBase, list[str]]:
    """Set on the linear layers the attributes of vLLM's layers that INC reads. Returns the layers
    with their paths."""
    linears: dict[LinearBase, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LinearBase):
            linears.setdefault(module, []).append(path)
    for linear in linears:
        if not isinstance(linear.method, IncLinearMethod):
            linear.method = IncLinearMethod()
        vars(linear).update(
            quant_method=linear.method,
            skip_bias_add=False,
            return_bias=False,
            gather_output=False,
            input_is_parallel=True,
            reduce_results=True,
            tp_size=linear.group.size,
        )
    return linears


def _adapt(model: nn.Module, original: LinearBase, paths: list[str]) -> None:
    """Set the module that replaced `original` at all of its `paths`, with a forward that can be
    called like the forward of `original`."""
    found = (model.get_submodule(path) for path in paths)
    # INC replaces a shared module at a single path only.
    patched = next((module for module in found if module is not original), None)
    if patched is None:
        return
    for path in paths:
        model.set_submodule(path, patched)
    if isinstance(original, ParallelLMHead):
        # Keep the head's own forward, which gathers the shards: INC has replaced its linear method.
        vars(patched)["forward"] = original.forward
    else:
        vars(patched)["forward"] = _without_bias(patched.forward)


def _write_alone(cache: nn.Module) -> None:
    """Make a patched KV cache write without dequantizing the whole cache: the caller ignores the
    result. In the lazy modes the runtime drops unused results; in other modes dequantizing takes
    time and memory."""
    quantize, original = cast(Any, cache.quant_input), cast(Any, cache.orig_mod)

    def forward(input: Tensor, cache: Tensor, slot_mapping: Tensor) -> Tensor:
        out: Tensor = original(quantize(input), cache, slot_mapping)
        return out

    vars(cache)["forward"] = forward


def _without_bias(forward: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Drop the bias from the result of `forward`: patched vLLM layers also return the bias."""

    def call(x: Tensor) -> Tensor:
        returned = forward(x)
        out: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return out

    return call
