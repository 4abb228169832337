"""Results of a rank with the quantized weights of a checkpoint."""

from pathlib import Path

import torch
from paged_harness import PagedHarness
from rank_pool import PROMPTS
from torch import Tensor

from config.model.read_config import read_model_config
from hpu.backends.cpu import CpuBackend, use_cpu_kernels
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.layers.moe import Experts
from hpu.model_loader.loader import load_weights
from hpu.models.base import CausalLM, ModelBuild
from hpu.models.decoder import Decoder
from hpu.models.registry import build_model
from hpu.native.library import open_library
from hpu.quantization.at_load import AtLoadScheme
from hpu.quantization.registry import process_weights
from hpu.quantization.stored.checkpoint import CheckpointScheme


def load_packed(
    folder: str, group: ProcessGroup = SINGLE, expert_group: ProcessGroup = SINGLE
) -> Decoder:
    """A bfloat16 model with weights that the CPU multiplies in packed form."""
    cpu, dtype = CpuBackend(1), torch.bfloat16
    model = build_model(
        read_model_config(folder),
        ModelBuild(
            dtype=dtype,
            device=torch.device("cpu"),
            quantization=CheckpointScheme(
                lambda weight: cpu.linear_method(weight, dtype),
                lambda experts: cpu.moe_method(experts, dtype),
            ),
            group=group,
            expert_group=expert_group,
        ),
    )
    load_weights(
        model,
        folder,
        on_progress=lambda done, total: None,
        group=group,
        expert_group=expert_group,
    )
    process_weights(model, None)
    return model


def prefill_packed(
    group: ProcessGroup,
    folder: str,
    kernels: Path | None = None,
    distributes_experts: bool = False,
) -> Tensor:
    """Logits of PROMPTS, computed with the compiled kernels in the folder `kernels` if given."""
    library = None if kernels is None else open_library(kernels, 1)
    model = load_packed(folder, group, group if distributes_experts else SINGLE)
    prepared = use_cpu_kernels(model, library)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert all((expert.moe_op is None) == (library is None) for expert in experts)
    assert isinstance(prepared, CausalLM)
    return torch.cat([*PagedHarness(prepared).prefill(PROMPTS).values()]).float()


def weights_of(group: ProcessGroup, folder: str, name: str) -> dict[str, Tensor]:
    """This rank's weights of a checkpoint, quantized at load to the format `name` if given."""
    schemes = [AtLoadScheme(name, lambda weight: None, lambda experts: None)] if name else [None]
    model = build_model(
        read_model_config(folder),
        ModelBuild(
            dtype=torch.float32, device=torch.device("cpu"), quantization=schemes[0], group=group
        ),
    )
    load_weights(model, folder, on_progress=lambda done, total: None, group=group)
    process_weights(model, None)
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}
