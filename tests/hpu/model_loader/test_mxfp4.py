"""MXFP4 compared with transformers' conversion, alone and as a checkpoint."""

from pathlib import Path

import pytest
import random_checkpoint
import torch
from lazy_loading import assert_lazy_load_copies_nothing
from paged_harness import load_decoder
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from config.errors import ConfigError
from config.model.read_config import read_model_config
from hpu.distributed.process_groups import ProcessGroup
from hpu.model_loader.loader import load_weights
from hpu.model_loader.quantized_weights import dequantize_mxfp4
from hpu.model_loader.size_estimate import count_parameters
from hpu.models.base import ModelBuild
from hpu.models.registry import build_model

WEIGHTS = "model.safetensors"
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
EXPERTS = "model.layers.1.mlp.experts."
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return random_checkpoint.write_random(
        tmp_path, "GptOssForCausalLM", intermediate_size=96, **MXFP4
    )


def converted(folder: Path, name: str) -> Tensor:
    """Expert weights (count, out, in) of the projection `name`, dequantized by transformers."""
    tensors = load_file(folder / WEIGHTS)
    halves = (tensors[f"{EXPERTS}{name}_{half}"] for half in ("blocks", "scales"))
    return convert_moe_packed_tensors(*halves).transpose(1, 2)  # type: ignore[no-any-return, no-untyped-call]  # theirs


def test_every_code_and_scale_is_dequantized_as_in_transformers() -> None:
    # All byte values, with all scales that give finite products.
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16)
    blocks = blocks.repeat(1, 252).view(16, 252, 16)
    scales = torch.arange(252, dtype=torch.uint8).expand(16, -1)

    found = dequantize_mxfp4(blocks, scales)

    expected = convert_moe_packed_tensors(blocks.unsqueeze(0), scales.unsqueeze(0))[0].t()  # type: ignore[no-untyped-call]  # theirs
    assert found.shape == (16, 252 * 32) and found.dtype == torch.bfloat16
    assert found.isfinite().all()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_checkpoint_is_dequantized_exactly(folder: Path, dtype: torch.dtype) -> None:
    state = load_decoder(folder, dtype=dtype).state_dict()

    for parameter, name in (("w13_weight", "gate_up_proj"), ("w2_weight", "down_proj")):
        found, expected = state[EXPERTS + parameter], converted(folder, name)
        assert found.dtype == dtype and expected.float().std() > 0.01
        assert torch.equal(found, expected.to(dtype))


def test_mxfp4_blocks_and_scales_may_be_in_different_files(folder: Path) -> None:
    expected = load_decoder(folder).state_dict()
    tensors = load_file(folder / WEIGHTS)
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scales")}
    (folder / WEIGHTS).unlink()
    save_file(scales, folder / "model-1.safetensors")
    save_file(tensors, folder / "model-2.safetensors")

    state = load_decoder(folder).state_dict()

    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_two_ranks_split_mxfp4_weights_within_a_block(folder: Path) -> None:
    config = read_model_config(str(folder))
    shards = []
    for rank in (0, 1):
        group = ProcessGroup(range(2), rank)
        model = build_model(config, ModelBuild(dtype=torch.bfloat16, device=CPU, group=group))
        load_weights(model, str(folder), on_progress=lambda done, total: None, group=group)
        shards.append(model.state_dict())
        elements = sum(parameter.numel() for parameter in model.parameters())
        assert elements == count_parameters(config, 2)

    # 48 inner features on each rank, while a scale covers 32; gate and up stay interleaved.
    wide = torch.cat([shard[f"{EXPERTS}w13_weight"] for shard in shards], dim=1)
    narrow = torch.cat([shard[f"{EXPERTS}w2_weight"] for shard in shards], dim=2)
    assert torch.equal(wide, converted(folder, "gate_up_proj"))
    assert torch.equal(narrow, converted(folder, "down_proj"))
    biases = [shard[f"{EXPERTS}w13_bias"] for shard in shards]
    stored = load_file(folder / WEIGHTS)[f"{EXPERTS}gate_up_proj_bias"]
    assert torch.equal(torch.cat(biases, dim=1), stored.bfloat16())


def test_loading_to_a_lazy_device_takes_the_memory_of_the_weights_and_no_copies(
    folder: Path,
) -> None:
    assert_lazy_load_copies_nothing(folder, load_decoder(folder, dtype=torch.bfloat16).state_dict())


def test_the_error_names_missing_scales_and_scales_of_another_dtype(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = f"{EXPERTS}down_proj_scales"
    scales = tensors.pop(name)
    save_file(tensors, folder / WEIGHTS)

    with pytest.raises(ConfigError, match=rf"are missing: {name} 4x64x3"):
        load_decoder(folder)

    save_file({**tensors, name: scales.float()}, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=rf"{name} in .* is F32, MXFP4 must be U8"):
        load_decoder(folder)


def test_the_error_names_a_nan_scale(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = f"{EXPERTS}down_proj_scales"
    tensors[name][1, 2, 0] = 255
    save_file(tensors, folder / WEIGHTS)

    with pytest.raises(
        ConfigError, match=rf"{name} in {folder}.* has 1 of 768 scales that are NaN"
    ):
        load_decoder(folder)
