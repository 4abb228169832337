"""KV cache formats in a worker: on the CPU, and on the strict emulated card, which compiles nothing
after warm-up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import emulated
from paged_harness import PagedHarness, load_decoder
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor
from two_prompts import greedy, random_traffic, working, working_wide

from config.engine import CacheConfig
from config.errors import ConfigError
from config.execution import HPU_GRAPHS, EmulatorSettings, ExecutionConfig, ModeChoice
from hpu.backends.gaudi import GaudiBackend
from hpu.gaudi_devices import GENERATIONS
from hpu.layers.attention import PagedAttention
from hpu.layers.attention_base import KVCacheSpec, Shape
from hpu.quantization.kv_cache import (
    EncodedKVCache,
    HpuFp8Format,
    KVCacheFormat,
    fp8_errors,
)
from hpu.runner.kv_cache import KVCache

COUNTERS = ("compilations", "captures", "fallbacks")
ONE = torch.ones(1)
GRAPHS, COMPILE = ExecutionConfig(mode="hpu-graphs"), ExecutionConfig(mode="torch-compile")


def on_cpu(folder: Path, kv_cache_dtype: str, **settings: Any) -> list[list[int]]:
    with working(folder, kv_cache_dtype=kv_cache_dtype, **settings) as rig:
        return greedy(rig, 6) + random_traffic(rig, 1)


def on_card(
    folder: Path,
    kv_cache_dtype: str,
    generation: str = "gaudi3",
    execution: ExecutionConfig = GRAPHS,
    **settings: Any,
) -> tuple[list[list[int]], int, int]:
    """(tokens, recipes compiled before the first request, bytes of the cache)."""
    with working(
        folder,
        device="hpu-emulator",
        execution=execution,
        emulator=EmulatorSettings(card=generation, is_strict=True),
        kv_cache_dtype=kv_cache_dtype,
        **settings,
    ) as rig:
        counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
        before = [counts[name] for name in COUNTERS]
        found = greedy(rig, 6) + random_traffic(rig, 1)
        after = [counts[name] for name in COUNTERS]
        num_bytes = rig.ready.kv_bytes
    assert after == before and before[2] == 0
    return found, before[0], num_bytes


def test_a_float16_model_is_served_with_an_fp8_cache(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)

    found, _, _ = on_card(folder, "fp8", dtype="float16")

    assert found == on_cpu(folder, "fp8")


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "float16"])
def test_a_card_gives_the_tokens_of_the_cpu(kv_cache_dtype: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)

    found, _, num_bytes = on_card(folder, kv_cache_dtype)

    # In float32, so that both devices round the same numbers.
    assert found == on_cpu(folder, kv_cache_dtype)
    # Keys and values shrink, but the flag of each slot (hpu/layers/non_finite.py) does not.
    factor = 4 if kv_cache_dtype == "fp8" else 2
    flags = (factor * num_bytes - on_card(folder, "auto")[2]) / (factor - 1)
    # Two layers with keys and values of two heads of 16: 128 numbers and a flag of 4 bytes per
    # slot.
    assert flags / num_bytes == 4 / (4 + 128 * 4 // factor)


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma3_text"])
def test_mla_and_windows_on_a_card_give_the_tokens_of_the_cpu(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path)

    assert on_card(folder, "fp8")[0] == on_cpu(folder, "fp8")


@pytest.mark.parametrize(
    ("generation", "execution"),
    [
        ("gaudi2", GRAPHS),
        ("gaudi3", GRAPHS),
        pytest.param("gaudi2", COMPILE, marks=pytest.mark.slow),
    ],
)
def test_all_layers_share_their_recipes(
    generation: str, execution: ExecutionConfig, tmp_path: Path
) -> None:
    counts = []
    # The first layer's recipe has the embedding too.
    for num_layers in (2, 3):
        folder = make_tiny("llama", tmp_path / str(num_layers), num_hidden_layers=num_layers)
        counts.append(on_card(folder, "fp8_inc", generation, execution, dtype="bfloat16")[1])

    assert counts[0] == counts[1]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_window_sized_caches_give_the_tokens_of_full_caches(
    kv_cache_dtype: str, tmp_path: Path
) -> None:
    folder = make_tiny("gpt_oss", tmp_path)
    found = []

    for prefix_caching in (True, False):
        settings: dict[str, Any] = {
            "kv_cache_dtype": kv_cache_dtype,
            "prefix_caching": prefix_caching,
        }
        with working_wide(folder, **settings) as rig:
            found.append((greedy(rig), rig.ready.kv_bytes))

    whole, rings = found
    assert rings[0] == whole[0]
    assert rings[1] < whole[1]


def test_the_transformers_fallback_supports_the_same_cache_formats(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)

    int8 = on_cpu(folder, "int8", model_impl="transformers")
    fp8, _, _ = on_card(folder, "fp8", model_impl="transformers")

    assert int8 == on_cpu(folder, "int8")
    assert fp8 == on_cpu(folder, "fp8")


class _Layer:
    """A fake layer with two heads of three numbers in a format."""

    non_finite_guard = None

    def __init__(self, format: KVCacheFormat) -> None:
        self._spec = KVCacheSpec(2, 3, torch.bfloat16, format=format)
        self.keys = torch.empty(0)

    def cache_shapes(
        self, num_blocks: int, block_size: int, num_rings: int = 0
    ) -> list[tuple[Shape, ...]]:
        return [self._spec.shapes(num_blocks, block_size, num_rings)]

    def cache_windows(self) -> list[int | None]:
        return [None]

    def bind_caches(
        self, caches: list[tuple[Tensor, Tensor]], block_size: int, num_rings: int = 0
    ) -> None:
        self.keys = caches[0][0]


def test_blocks_on_a_card_are_moved_and_scrubbed_in_fp8() -> None:
    mode = ModeChoice(HPU_GRAPHS, "the test's")
    x = torch.randn(11 * 4, 2, 3).bfloat16()
    x[4 * 9 + 2, 1, 0] = torch.nan
    with torch.inference_mode(), emulated(strict=True) as card:
        backend = GaudiBackend(ExecutionConfig(), mode)
        format = HpuFp8Format("fp8", 240.0)
        layer = _Layer(format)
        cache = KVCache(
            layer, backend, num_blocks=10, block_size=4, dtype=format.dtype, clean=format.clean
        )
        cache.warm_scrub()
        cache.warm_moves()
        codec = format.codec(torch.bfloat16, torch.ones(1).to("hpu"))
        every = torch.arange(11 * 4, dtype=backend.index_dtype).to("hpu")
        EncodedKVCache(codec)(x.to("hpu"), layer.keys, every)
        before = codec.decode(layer.keys).cpu()
        backend.event()
        card.end_warmup()

        with card.step():
            cache.move_blocks([8, 9], [0, 1])
            cache.scrub([1])

        found = layer.keys.cpu().float() * (448 / 240)
        backend.close()

    # The old places of moved blocks are zero. In all other blocks only non-finite values have
    # changed.
    assert torch.allclose(found[:4], before[32:36].float(), rtol=2**-7)
    assert before[38, 1, 0].isnan() and found[6, 1, 0] == 0
    assert not found[32:40].any()
    assert torch.allclose(found[8:32], before[8:32].float(), rtol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_scale_represents_the_same_numbers_on_every_card(
    generation: str, dtype: torch.dtype
) -> None:
    largest = GENERATIONS[generation].fp8_max
    x = torch.tensor([[1000.0, 112.0, -56.0, 0.25, 0.0]])
    with emulated(generation=generation):
        scale = torch.tensor([0.25]).to("hpu")
        codec = HpuFp8Format("fp8", largest).codec(dtype, scale)

        rows = codec.encode(x.to(dtype).to("hpu"))
        found = codec.decode(rows).cpu()

        assert found.dtype == dtype
        assert rows.dtype == torch.float8_e4m3fn
        assert float(rows.cpu().float().abs().max()) == largest
    # With a scale of 1/4, the largest number is 112.
    expected = x.clamp(-112.0, 112.0)
    assert torch.allclose(found.float(), expected, rtol=2**-4)


def with_large_values(folder: Path, **fields: Any) -> Path:
    """A model whose values are all near 1.06, between the codes 1 and 1.125."""
    folder = make_tiny("qwen2", folder, **fields)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "v_proj" in name:
            tensors[name] = torch.full_like(tensor, 1.06) if "bias" in name else tensor / 1000
    save_file(tensors, file)
    return folder


def calculated(folder: Path, **settings: Any) -> Tensor:
    """Scales (layers, 2) of keys and values."""
    with working(folder, kv_cache_dtype="fp8", calculate_kv_scales=True, **settings) as rig:
        loaded = rig.worker.loaded
        assert loaded is not None
        (model,) = loaded.modules
        layers = [module for module in model.modules() if isinstance(module, PagedAttention)]
        return torch.tensor([[float(kv_scale) for kv_scale in layer.kv_scales] for layer in layers])  # type: ignore[arg-type]


def test_calculated_scales_fit_the_numbers_that_are_cached(tmp_path: Path) -> None:
    folder = with_large_values(tmp_path, num_hidden_layers=3)

    scales = calculated(folder)

    assert scales.shape == (3, 2)
    model = load_decoder(folder)
    harness = PagedHarness(model)
    harness.prefill({0: torch.randint(256, (100,)).tolist()})
    layers = [module for module in model.modules() if isinstance(module, PagedAttention)]
    for layer, own in zip(layers, scales, strict=True):
        # The harness fills unused blocks with large numbers.
        keys, values = (cach[cach.abs().amax((1, 2)) < 1000] for cach in layer.caches)
        assert len(keys) == len(values) == 100
        assert keys.abs().max() < 448 * own[0] and values.abs().max() < 448 * own[1]
        errors = fp8_errors(values, torch.stack((own[1], torch.tensor(1.0))))
        assert errors[0] < errors[1] / 4


@pytest.mark.parametrize("generation", GENERATIONS)
def test_scales_are_calculated_for_the_fp8_range_of_the_card(
    generation: str, tmp_path: Path
) -> None:
    folder = with_large_values(tmp_path, num_hidden_layers=1)
    emulator = EmulatorSettings(card=generation, is_strict=True)

    scales = calculated(folder, device="hpu-emulator", execution=GRAPHS, emulator=emulator)

    format = HpuFp8Format("fp8", GENERATIONS[generation].fp8_max)
    with emulated(generation=generation):
        x = torch.full((1, 1), 1.06).to("hpu")
        codecs = [format.codec(torch.float32, item.to("hpu")) for item in (scales[0, 1:], ONE)]
        error, before = (float((codec.decode(codec.encode(x)) - x).abs().cpu()) for codec in codecs)
    assert error < 0.025 and (generation == "gaudi2" or before > 0.05)


def test_a_card_gives_the_tokens_of_the_cpu_with_calculated_scales(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)

    found, _, _ = on_card(folder, "fp8", calculate_kv_scales=True)

    assert found == on_cpu(folder, "fp8", calculate_kv_scales=True)
    assert found != on_cpu(folder, "fp8")


def test_scales_are_calculated_only_for_fp8() -> None:
    with pytest.raises(ConfigError, match="calculate_kv_scales is set and kv_cache_dtype is int8"):
        CacheConfig(kv_cache_dtype="int8", calculate_kv_scales=True)


def test_int8_is_refused_on_a_card(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)

    with pytest.raises(ConfigError, match="kv_cache_dtype is int8 and device is hpu-emulator"):
        on_card(folder, "int8")

    # With --device auto the config does not know the card yet, so the back end checks, too.
    with emulated():
        backend = GaudiBackend(ExecutionConfig(), ModeChoice(HPU_GRAPHS, "the test's"))
        with pytest.raises(ConfigError, match="--kv-cache-dtype is int8 and the device is hpu"):
            backend.kv_cache_format("int8", torch.bfloat16)
        backend.close()


@pytest.mark.parametrize(
    ("kv_cache_dtype", "calculates_scales", "level"),
    [("float16", False, 1), ("fp8", False, 1), ("fp8", True, 2), ("int8", False, 1)],
)
@pytest.mark.parametrize("cpu_kernels", ["auto", "torch"])
def test_a_cached_prefix_and_a_sleep_change_no_token(
    kv_cache_dtype: str, calculates_scales: bool, level: int, cpu_kernels: str, tmp_path: Path
) -> None:
    folder = make_tiny("llama", tmp_path, head_dim=32, hidden_size=128, num_attention_heads=4)
    dtype = "bfloat16" if cpu_kernels == "auto" else "float32"
    settings: dict[str, Any] = {
        "kv_cache_dtype": kv_cache_dtype,
        "calculate_kv_scales": calculates_scales,
        "cpu_kernels": cpu_kernels,
        "dtype": dtype,
    }
    prompt = [3, 5, 7, 9, 11] * 9

    with working(folder, **settings) as rig:
        rig.admit(0, prompt)
        rig.prefill({0: None})
        rig.step()
        # The second request shares its first blocks with the other request.
        rig.admit(1, prompt, shared_with=0)
        rig.prefill({1: None})
        rig.step()
        for _ in range(8):
            rig.decode([0, 1])
            rig.step()
        whole, shared = rig.free(0), rig.free(1)
        num_bytes = rig.ready.kv_bytes
        # The step tells the worker that both requests are freed.
        rig.step()
        rig.worker.sleep(level)
        ready = rig.worker.wake_up(lambda progress: None)
        awake = greedy(rig, 6)

    assert whole == shared and len(whole) == 9
    assert ready.kv_bytes == num_bytes
    with working(folder, **settings) as rig:
        assert greedy(rig, 6) == awake
