"""Selects the quantization methods of a model's layers by name."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from config.checkpoint.weight_maps.shard import Shard
from config.engine import EngineConfig
from config.errors import ConfigError, bytes_text
from config.model.model_config import BLOCKS, ModelConfig
from config.model.quantization.inc import INC, read_quant_config
from config.startup_checks import chosen_quantization
from hpu.distributed.process_groups import ProcessGroup
from hpu.layers.linear import LinearBase
from hpu.layers.mla import PagedLatentAttention
from hpu.layers.moe import Experts
from hpu.quantization.base import LinearMethod, ModelPatcher, QuantizationScheme
from hpu.quantization.gguf import GgufBlocks
from hpu.quantization.inc import IncCompressor, IncScheme
from hpu.quantization.quantized_weight import GROUP_SIZE, QuantizedWeight
from hpu.quantization.stored.checkpoint import CheckpointScheme, MakeMethod, MakeMoEMethod
from hpu.quantization.weight_only import WeightOnlyLinearMethod, quantize_int4, quantize_int8

logger = logging.getLogger(__name__)


class _WithoutExperts:
    """Base of the schemes that quantize after loading: experts are not quantized."""

    def moe_method(
        self,
        w13: list[Shard],
        w2: list[Shard],
        hidden_size: int,
        inner_size: int,
        activation: str,
    ) -> None:
        return


class Int8(_WithoutExperts):
    """8 bits in all linear layers."""

    def linear_method(
        self, shards: list[Shard], in_features: int, *, is_head: bool
    ) -> LinearMethod:
        return WeightOnlyLinearMethod(quantize_int8)


class Int4(_WithoutExperts):
    """4 bits, except 8 bits in the head and in layers whose inputs are not a multiple of
    GROUP_SIZE."""

    def linear_method(
        self, shards: list[Shard], in_features: int, *, is_head: bool
    ) -> LinearMethod:
        if is_head or in_features % GROUP_SIZE:
            return WeightOnlyLinearMethod(quantize_int8)
        return WeightOnlyLinearMethod(quantize_int4)


class _Gguf(_WithoutExperts):
    """The bits of the GGUF file."""

    def __init__(self, path: Path) -> None:
        self._blocks = GgufBlocks(path)

    def linear_method(
        self, shards: list[Shard], in_features: int, *, is_head: bool
    ) -> LinearMethod:
        def blocks_of(weight: Tensor) -> QuantizedWeight | None:
            blocks = self._blocks.weight(shards)
            # A rank with a padded vocabulary shard has more rows than the file.
            is_whole = blocks is not None and blocks.values.shape == weight.shape
            return blocks if is_whole else None

        return WeightOnlyLinearMethod(blocks_of)


SCHEMES: dict[str, Callable[[EngineConfig], QuantizationScheme]] = {
    "int8": lambda config: Int8(),
    "int4": lambda config: Int4(),
    "gguf": lambda config: _Gguf(Path(config.model) / BLOCKS),
}


def select_quantization(
    config: EngineConfig,
    facts: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    make_method: MakeMethod,
    make_moe_method: MakeMoEMethod,
) -> QuantizationScheme | None:
    """Scheme of the checkpoint, with the methods from `make_method` and `make_moe_method`, or the
    scheme that `config.quantization` names; None: no quantization. Raises ConfigError if they
    contradict each other, or if the device cannot multiply weights quantized after loading, which
    need bfloat16 activations on a CPU."""
    name = chosen_quantization(config.quantization, facts)
    if facts.is_quantized and (name is None or facts.quantization is not None):
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
    if device.type != "cpu" or dtype != torch.bfloat16:
        raise ConfigError(
            f"quantization is {name}: it needs bfloat16 on a CPU, and this is "
            f"{str(dtype).removeprefix('torch.')} on {device.type}"
        )
    return SCHEMES[name](config)


def select_patcher(config: EngineConfig, group: ProcessGroup) -> ModelPatcher | None:
    """Patcher of the loaded model, on a rank of the tensor-parallel `group`; None if no patcher is
    configured. Raises ConfigError."""
    if config.quantization != INC:
        return None
    return IncCompressor(read_quant_config(config.quant_config), group)


def process_weights(model: nn.Module, quantization: str | None) -> int:
    """Let the method of each linear layer and of the experts convert the loaded weights, and let
    latent attention build the matrices that its decodes absorb. Returns the bytes of the quantized
    weights, which are not parameters of `model`."""
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
