"""Selects the quantization methods of a model's layers by name."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from config.engine import EngineConfig
from config.errors import ConfigError, bytes_text
from config.model.model_config import BLOCKS, ModelConfig
from config.model.quantization.inc import INC, read_quant_config
from config.model.quantization.registry import SCHEMES_AT_LOAD
from config.startup_checks import check_format_at_load, chosen_quantization
from hpu.distributed.process_groups import ProcessGroup
from hpu.layers.linear import LinearBase
from hpu.layers.mla import PagedLatentAttention
from hpu.layers.moe import Experts
from hpu.quantization.at_load import AtLoadScheme
from hpu.quantization.base import (
    ExpertsShards,
    LinearMethod,
    LinearShards,
    QuantizationScheme,
)
from hpu.quantization.gguf import GgufBlocks
from hpu.quantization.inc import IncCompressor, IncScheme
from hpu.quantization.quantized_weight import GROUP_SIZE, QuantizedWeight
from hpu.quantization.stored.checkpoint import CheckpointScheme, MakeMethod, MakeMoEMethod
from hpu.quantization.weight_only import WeightOnlyLinearMethod, quantize_int4, quantize_int8

logger = logging.getLogger(__name__)


class _WithoutExperts:
    """Base of the schemes that do not support models with experts."""

    def moe_method(self, experts: ExpertsShards) -> None:
        return


class Int8(_WithoutExperts):
    """Quantizes linear layers to 8 bits."""

    def linear_method(self, weight: LinearShards) -> LinearMethod:
        return WeightOnlyLinearMethod(quantize_int8)


class Int4(_WithoutExperts):
    """Quantizes to 4 bits; the head, and layers whose inputs are not a multiple of GROUP_SIZE, to 8
    bits."""

    def linear_method(self, weight: LinearShards) -> LinearMethod:
        if weight.is_head or weight.in_features % GROUP_SIZE:
            return WeightOnlyLinearMethod(quantize_int8)
        return WeightOnlyLinearMethod(quantize_int4)


class _Gguf(_WithoutExperts):
    """Uses the quantized blocks of the GGUF file."""

    def __init__(self, path: Path) -> None:
        self._blocks = GgufBlocks(path)

    def linear_method(self, weight: LinearShards) -> LinearMethod:
        def blocks_of(plain: Tensor) -> QuantizedWeight | None:
            blocks = self._blocks.weight(weight.shards)
            # A rank with a padded vocabulary shard has more rows than the file.
            is_whole = blocks is not None and blocks.values.shape == plain.shape
            return blocks if is_whole else None

        return WeightOnlyLinearMethod(blocks_of)


SCHEMES: dict[str, Callable[[EngineConfig], QuantizationScheme]] = {
    "int8": lambda config: Int8(),
    "int4": lambda config: Int4(),
    "gguf": lambda config: _Gguf(Path(config.model) / BLOCKS),
}


def select_quantization(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    make_method: MakeMethod,
    make_moe_method: MakeMoEMethod,
) -> QuantizationScheme | None:
    """Scheme of the checkpoint, with the methods from `make_method` and `make_moe_method`, or the
    scheme that `config.quantization` names; None: no quantization. Raises ConfigError if they
    contradict each other, or if `device` or `dtype` does not support the scheme."""
    name = chosen_quantization(config.quantization, model_config)
    if model_config.is_quantized and (name is None or model_config.quantization is not None):
        return CheckpointScheme(make_method, make_moe_method)
    if name is None:
        return None
    if name == INC:
        if device.type != "hpu" or dtype != torch.bfloat16:
            raise ConfigError(
                f"quantization is {INC}: it needs bfloat16 on hpu, and this is "
                f"{str(dtype).removeprefix('torch.')} on {device.type}"
            )
        return IncScheme()
    if name in SCHEMES_AT_LOAD:
        check_format_at_load(name, model_config, device.type)
        if device.type != "hpu":
            logger.warning(
                "Quantization: %s on %s rounds the weights and keeps them in %s: memory and time "
                "are as without quantization",
                name,
                device.type,
                str(dtype).removeprefix("torch."),
            )
        return AtLoadScheme(name, make_method, make_moe_method)
    if device.type != "cpu" or dtype != torch.bfloat16:
        raise ConfigError(
            f"quantization is {name}: it needs bfloat16 on a CPU, and this is "
            f"{str(dtype).removeprefix('torch.')} on {device.type}"
        )
    return SCHEMES[name](config)


def select_patcher(config: EngineConfig, group: ProcessGroup) -> IncCompressor | None:
    """Patcher of the loaded model, on a rank of the tensor-parallel `group`; None if no patcher is
    configured. Raises ConfigError."""
    if config.quantization != INC:
        return None
    return IncCompressor(read_quant_config(config.quant_config), group)


def process_weights(model: nn.Module, quantization: str | None) -> int:
    """Run `process_weights` of each linear layer, of the experts, and of latent attention, which
    builds its absorbed matrices. Returns the bytes of the quantized weights, which are not
    parameters of `model`."""
    start = time.perf_counter()
    num_bytes = num_kept = num_unquantized = 0
    for layer in model.modules():
        if isinstance(layer, PagedLatentAttention):
            layer.process_weights()
        elif isinstance(layer, Experts):
            layer.method.process_weights(layer)
            if layer.quantized_weights is not None:
                num_bytes += layer.quantized_weights.num_bytes
            elif layer.w13_weight is None:
                num_kept += sum(parameter.nbytes for parameter in layer.parameters())
            else:
                num_unquantized += 1
        elif isinstance(layer, LinearBase):
            layer.method.process_weights(layer)
            if layer.quantized_weight is not None:
                num_bytes += layer.quantized_weight.num_bytes
            elif layer.weight is None:
                num_kept += sum(parameter.nbytes for parameter in layer.parameters())
            else:
                num_unquantized += 1
    if quantization is not None:
        logger.info(
            "Quantization: %s, %s, in %.1f s%s",
            quantization,
            bytes_text(num_bytes + num_kept),
            time.perf_counter() - start,
            f"; {num_unquantized} layers stay in the model's data type" if num_unquantized else "",
        )
    return num_bytes
