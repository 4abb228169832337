"""KV cache formats: stored values, and attention over them, with torch's operators and with the
compiled kernels."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_harness import PagedHarness, load_decoder
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor

from config.errors import CheckpointError, ConfigError
from hpu.backends.cpu import CpuBackend, use_cpu_kernels
from hpu.backends.cuda import CudaBackend
from hpu.models.base import CausalLM
from hpu.models.decoder import Decoder
from hpu.native.decoder import CompiledDecoder
from hpu.native.library import Library
from hpu.quantization.kv_cache import KVCacheFormat, plain_format
from hpu.runner.kv_cache import block_bytes

FORMATS = ("float16", "fp8", "int8")
PROMPTS = {0: list(range(10, 60)), 1: list(range(70, 77)), 2: [9]}
NEXT = [{0: 5, 1: 6, 2: 7}, {0: 8, 1: 9, 2: 10}]
HEADS: dict[str, Any] = {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4}
LARGEST_ERROR = {"float16": 2**-11, "bfloat16": 2**-8, "fp8": 2**-4, "int8": 1 / 254}
"""Relative error of each number; for int8, relative to the largest number of a row."""


def format_of(name: str, dtype: torch.dtype = torch.bfloat16) -> KVCacheFormat:
    found = plain_format(name, dtype)
    assert found is not None
    return found


def set_scales(model: Decoder, scale: float) -> None:
    """Set the scales of all layers: keys are stored as multiples of `scale`, values as multiples of
    half of it."""
    for name, parameter in model.named_parameters():
        if name.endswith("k_scale"):
            parameter.fill_(scale)
        elif name.endswith("v_scale"):
            parameter.fill_(scale / 2)


def loaded(
    folder: Path, format: KVCacheFormat | None, dtype: torch.dtype, scale: float = 1.0
) -> Decoder:
    model = load_decoder(folder, dtype=dtype, format=format)
    set_scales(model, scale)
    return model


def on_kernels(model: Decoder, library: Library) -> CompiledDecoder:
    found = use_cpu_kernels(model, library)
    assert isinstance(found, CompiledDecoder) and found.is_compiled
    return found


def decoded(model: CausalLM, dtype: torch.dtype | None = None) -> Tensor:
    """Logits of two decodes of three rows, after prompts of the same model, the longest in two
    chunks. `dtype`: dtype of the caches."""
    harness = PagedHarness(model, cache_dtype=dtype)
    harness.prefill({0: PROMPTS[0][:30]})
    harness.prefill({**PROMPTS, 0: PROMPTS[0][30:]})
    steps = [harness.decode(last) for last in NEXT]
    return torch.stack([step[row] for step in steps for row in PROMPTS]).float()


def error_of(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).square().mean().sqrt())


@pytest.mark.parametrize("name", [*FORMATS, "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stored_row_is_read_within_the_precision_of_its_format(
    name: str, dtype: torch.dtype
) -> None:
    if (name, dtype) == ("bfloat16", torch.bfloat16):
        assert plain_format(name, dtype) is None
        return
    format = format_of(name, dtype)
    x = torch.randn(5, 3, 32).to(dtype)
    x[2] = 0
    codec = format.codec(dtype, torch.tensor([0.5]) if format.has_layer_scales else None)

    rows = codec.encode(x)

    assert rows.dtype == format.dtype and rows.shape == (5, 3, format.row_size(32))
    error = (codec.decode(rows).float() - x.float()).abs()
    scale = x.float().abs()
    if name == "int8":
        scale = scale.amax(-1, keepdim=True).expand_as(scale)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
    # Small FP8 numbers have an absolute spacing.
    assert (error <= scale * (LARGEST_ERROR[name] + rounding) + 2**-11).all()
    assert torch.equal(codec.decode(rows)[2], x[2])


def test_numbers_above_the_range_are_stored_as_the_largest() -> None:
    x = torch.tensor([1e6, -1e6, 1.0, 0.0])

    fp8 = format_of("fp8").codec(torch.float32, torch.tensor([2.0]))
    half = format_of("float16").codec(torch.float32, None)

    assert fp8.decode(fp8.encode(x)).tolist() == [896.0, -896.0, 1.0, 0.0]
    assert half.decode(half.encode(x)).tolist() == [65504.0, -65504.0, 1.0, 0.0]


@pytest.mark.parametrize("name", FORMATS)
def test_only_non_finite_rows_are_zeroed(name: str) -> None:
    format = format_of(name)
    codec = format.codec(torch.bfloat16, torch.ones(1) if format.has_layer_scales else None)
    x = torch.randn(4, 2, 16).bfloat16()
    x[1, 0, 3] = torch.nan
    rows = codec.encode(x)
    assert not codec.decode(rows)[1, 0, 3].isfinite()

    cleaned = format.clean(rows)

    others = [0, 2, 3]
    assert codec.decode(cleaned).isfinite().all()
    assert torch.equal(cleaned[others], rows[others]) and torch.equal(cleaned[1, 1], rows[1, 1])


def test_block_bytes_follow_the_cache_format(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, **HEADS)
    sizes = {}

    for name in FORMATS:
        model = load_decoder(folder, dtype=torch.bfloat16, format=format_of(name))
        sizes[name] = block_bytes(model, 16, format_of(name).dtype)

    plain = block_bytes(load_decoder(folder, dtype=torch.bfloat16), 16, torch.bfloat16)
    # A four-byte scale for each 32 numbers.
    assert sizes == {"float16": plain, "fp8": plain // 2, "int8": plain * 36 // 64}


@torch.inference_mode()
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {**HEADS, "num_key_value_heads": 1}),
        ("llama", {"hidden_size": 288, "num_attention_heads": 9, "num_key_value_heads": 3}),
        ("mistral", {**HEADS, "sliding_window": 9}),
        ("phi3", {**HEADS, "hidden_size": 256, "head_dim": 64}),
        ("qwen3", {**HEADS, "head_dim": 128, "num_key_value_heads": 4}),
    ],
)
def test_the_kernels_are_as_accurate_as_torch(
    name: str, family: str, overrides: dict[str, Any], library: Library, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, **overrides)
    format = format_of(name)
    exact = decoded(
        loaded(folder, format_of(name, torch.float32), torch.float32, 0.25), format.dtype
    )
    own = decoded(loaded(folder, format, torch.bfloat16, 0.25), format.dtype)
    model = on_kernels(loaded(folder, format, torch.bfloat16, 0.25), library)

    found = decoded(model, format.dtype)

    assert error_of(found, exact) < 1.5 * error_of(own, exact) + 1e-3
    # Random weights amplify the rounding of FP8, which differs in bfloat16.
    assert error_of(found, exact) < (0.25 if name == "fp8" else 0.1) * float(exact.std())


@torch.inference_mode()
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [0.001, 1.0, 100.0])
def test_the_kernels_store_the_same_values_as_torch(
    name: str, scale: float, library: Library, tmp_path: Path
) -> None:
    folder = make_tiny("llama", tmp_path, **HEADS)
    format = format_of(name)
    plain = PagedHarness(on_kernels(loaded(folder, None, torch.bfloat16), library))
    model = on_kernels(loaded(folder, format, torch.bfloat16, scale), library)
    encoded = PagedHarness(model, cache_dtype=format.dtype)

    for harness in (plain, encoded):
        harness.prefill(PROMPTS)

    # Compare the first layer only: its keys and values do not depend on a cache.
    for index, factor in enumerate((1.0, 0.5)):
        scales = torch.tensor([scale * factor]) if format.has_layer_scales else None
        slots = torch.tensor([plain.slot(0, position) for position in range(50)])
        expected = format.codec(torch.bfloat16, scales).encode(plain.caches[0][index][slots])
        assert torch.equal(encoded.caches[0][index][slots], expected)


@torch.inference_mode()
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_cached_prefix_gives_the_logits_of_a_single_launch(
    name: str, is_compiled: bool, built: Library, tmp_path: Path
) -> None:
    folder = make_tiny("llama", tmp_path, **HEADS)
    format, dtype = format_of(name, torch.float32), torch.float32
    if is_compiled:
        format, dtype = format_of(name), torch.bfloat16
    model = loaded(folder, format, dtype, 0.25)
    harness = PagedHarness(
        on_kernels(model, built) if is_compiled else model, cache_dtype=format.dtype
    )

    whole = harness.prefill({0: PROMPTS[0]})[0][-1]
    harness.prefill({1: PROMPTS[0][:32]})
    behind = harness.prefill({1: PROMPTS[0][32:]})[1][-1]

    # bfloat16 sums depend on their order.
    assert torch.allclose(behind, whole, atol=0.05 if is_compiled else 1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["deepseek_v3", "gemma3_text", "gpt_oss"])
def test_mla_windows_and_sinks_are_cached_in_the_format(
    name: str, family: str, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path)
    format = format_of(name, torch.float32)
    plain = decoded(load_decoder(folder))

    found = decoded(loaded(folder, format, torch.float32, 0.25), format.dtype)

    assert 0 < error_of(found, plain) < (0.25 if name == "fp8" else 0.1) * float(plain.std())


@pytest.mark.parametrize("name", FORMATS)
def test_cuda_refuses_a_format_with_device_and_format(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaBackend, "__init__", lambda self: None)

    with pytest.raises(ConfigError, match=f"--kv-cache-dtype is {name} and the device is cuda"):
        CudaBackend().kv_cache_format(name, torch.bfloat16)

    assert CpuBackend(1).kv_cache_format("auto", torch.bfloat16) is None


def write_scales(folder: Path, scales: dict[str, Tensor]) -> None:
    """Add tensors to the only weight file of a checkpoint."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **scales}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_scale", "self_attn.v_scale"),
    ],
)
def test_scales_of_a_checkpoint_are_read(key: str, value: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, **HEADS)
    write_scales(
        folder,
        {
            f"model.layers.1.{key}": torch.tensor(0.25),
            f"model.layers.1.{value}": torch.tensor([0.5], dtype=torch.bfloat16),
        },
    )

    model = load_decoder(folder, format=format_of("fp8"))

    found = [attention.attn.kv_scales for attention in model.attention_layers]  # type: ignore[attr-defined]
    assert [[float(scale) for scale in pair] for pair in found[:2]] == [[1, 1], [0.25, 0.5]]


def test_an_int8_cache_reads_no_scales_of_the_checkpoint(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, **HEADS)
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": scheme,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_scales(folder, {"model.layers.0.self_attn.k_scale": torch.tensor(0.25)})

    model = load_decoder(folder, format=format_of("int8"))
    scaled = load_decoder(folder, format=format_of("fp8"))

    assert not [name for name, _ in model.named_parameters() if "_scale" in name]
    assert float(scaled.attention_layers[0].attn.k_scale) == 0.25  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (torch.tensor(0.0), "has 1 of 1 scales that are zero"),
        (torch.tensor(float("nan")), "has 1 of 1 scales that are NaN or infinite"),
        (torch.tensor([float("inf")]), "has 1 of 1 scales that are NaN or infinite"),
        (torch.tensor(-1.0), "is -1, it must be above 0"),
        (torch.ones(2), "k_scale in model.safetensors is 2, the model needs 1"),
    ],
)
def test_an_impossible_scale_is_an_error_that_names_file_and_tensor(
    scale: Tensor, told: str, tmp_path: Path
) -> None:
    folder = make_tiny("llama", tmp_path, **HEADS)
    name = "model.layers.0.self_attn.k_proj.k_scale"
    write_scales(folder, {name: scale})

    with pytest.raises(CheckpointError, match=f"{re.escape(name)}.*model.safetensors") as caught:
        load_decoder(folder, format=format_of("fp8"))

    assert told in str(caught.value)


def test_two_names_of_the_same_scale_are_an_error(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, **HEADS)
    scale = torch.tensor(1.0)
    write_scales(
        folder,
        {
            "model.layers.0.self_attn.k_scale": scale,
            "model.layers.0.self_attn.attn.k_scale": scale.clone(),
        },
    )

    twice = r"k_scale is in model\.safetensors and in model\.safetensors"
    with pytest.raises(CheckpointError, match=twice):
        load_decoder(folder, format=format_of("fp8"))
