"""What a rank computes with the quantized weights of a checkpoint."""

import torch
from paged_harness import PagedHarness
from rank_pool import PROMPTS
from torch import Tensor

from config.model.read_config import read_model_config
from hpu.backends.cpu import CpuBackend, use_cpu_kernels
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.model_loader.loader import load_weights
from hpu.models.base import CausalLM
from hpu.models.decoder import Decoder
from hpu.models.registry import build_model
from hpu.native.library import Library
from hpu.quantization.checkpoint import CheckpointScheme
from hpu.quantization.registry import process_weights


def load_packed(folder: str, group: ProcessGroup = SINGLE) -> Decoder:
    """In bfloat16, with the weights that the CPU multiplies as they are."""
    cpu, dtype = CpuBackend(), torch.bfloat16
    model = build_model(
        read_model_config(folder),
        dtype=dtype,
        device=torch.device("cpu"),
        quantization=CheckpointScheme(lambda weight: cpu.linear_method(weight, dtype)),
        group=group,
    )
    load_weights(model, folder, on_progress=lambda done, total: None, group=group)
    process_weights(model, None)
    return model


def prefill_packed(group: ProcessGroup, folder: str, library: Library | None = None) -> Tensor:
    """Logits of PROMPTS."""
    prepared = use_cpu_kernels(load_packed(folder, group), library)
    assert isinstance(prepared, CausalLM)
    return torch.cat([*PagedHarness(prepared).prefill(PROMPTS).values()]).float()
