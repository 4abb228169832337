"""The CPU's compiled kernels equal torch's operators up to bfloat16 rounding."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import random_checkpoint
import torch
from paged_harness import PagedHarness, load_decoder
from tiny_models import make_tiny
from torch import Tensor
from worker_rig import WorkerRig

from config.model.architectures import ARCHITECTURES
from config.model.decoder_spec import DecoderSpec, TemperatureTuning
from config.model.read_config import read_model_config
from hpu.backends.cpu import use_cpu_kernels
from hpu.layers.moe import Experts, ExpertsSpec
from hpu.models.base import CausalLM, ModelBuild
from hpu.models.decoder import Decoder
from hpu.native import library as library_module
from hpu.native.decoder import CompiledDecoder
from hpu.native.library import Library, PackedExperts, PackedLinear, open_library
from hpu.native.panels import INT16_ROWS
from hpu.protocol import RequestSampling
from hpu.sampling.filters import argmax
from hpu.sampling.sampler import GREEDY

PROMPTS = {0: list(range(10, 60)), 1: list(range(70, 77)), 2: [9]}
NEXT = [{0: 5, 1: 6, 2: 7}, {0: 8, 1: 9, 2: 10}]
WHOLE_HEADS = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
HEADS = {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4}


def packed(folder: Path, library: Library | None) -> CausalLM:
    """Model on the kernels of `library`; without a library, an unpacked model."""
    model = load_decoder(folder, dtype=torch.bfloat16)
    return model if library is None else use_cpu_kernels(model, library)


def decoded(model: CausalLM, **padding: int) -> Tensor:
    """Logits of two decodes of three rows, after prompts that the same model computed."""
    harness = PagedHarness(model)
    harness.prefill(PROMPTS, **({"pad_query": 3} if padding else {}))
    steps = [harness.decode(last, **padding) for last in NEXT]
    return torch.stack([step[row] for step in steps for row in PROMPTS]).float()


def error_of(found: Tensor, exact: Tensor) -> Tensor:
    """Root mean square error."""
    return (found.float() - exact).square().mean().sqrt()


def assert_as_accurate(found: Tensor, own: Tensor, exact: Tensor, margin: float = 1e-3) -> None:
    """Assert that `found` is as accurate as `own`, which torch's operators computed."""
    error, limit = error_of(found, exact), error_of(own, exact)
    assert error < 1.5 * limit + margin, f"error {error}, of torch's operators {limit}"


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", HEADS),
        ("llama", {**HEADS, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"hidden_size": 288, "num_attention_heads": 9, "num_key_value_heads": 3}),
        ("mistral", {**HEADS, "sliding_window": 9}),
        ("qwen2", {**HEADS, "tie_word_embeddings": True}),
        ("qwen3", {**HEADS, "num_key_value_heads": 1}),
        ("granite", HEADS),
        ("phi3", {**HEADS, "hidden_size": 256, "head_dim": 64}),
        ("mixtral", HEADS),
        ("qwen2_moe", {**HEADS, "mlp_only_layers": [0], "norm_topk_prob": True}),
        ("qwen3_moe", {**HEADS, "num_experts": 6}),
        # Each token uses all experts, so that rounding does not change the routing.
        ("granitemoeshared", {**HEADS, "num_experts_per_tok": 4}),
        ("glm4_moe", {**HEADS, "head_dim": 64}),
        ("ernie4_5_moe", HEADS),
    ],
)
def test_a_decode_is_as_accurate_as_torch(
    family: str, overrides: dict[str, Any], library: Library, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, **overrides)
    exact = decoded(load_decoder(folder))
    model = packed(folder, library)

    found = decoded(model)

    assert model.is_compiled
    assert_as_accurate(found, decoded(packed(folder, None)), exact)
    assert error_of(found, exact) < 0.1 * exact.std()


@torch.inference_mode()
def test_small_additions_to_the_residual_stream_keep_their_precision(
    built: Library, tmp_path: Path
) -> None:
    layers = {"num_hidden_layers": 16, "residual_multiplier": 0.02, "logits_scaling": 1.0}
    folder = make_tiny("granite", tmp_path, **HEADS, **layers)
    exact = decoded(load_decoder(folder))

    found, rounded = decoded(packed(folder, built)), decoded(packed(folder, None))

    # The ratio is 0.53; with the residual stream in bfloat16 it would be about 1.
    assert error_of(found, exact) < 0.75 * error_of(rounded, exact)


def stacked(count: int, hidden: int, inner: int) -> Experts:
    experts = Experts(
        ExpertsSpec(count, hidden, inner, "silu"),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return experts


@torch.inference_mode()
@pytest.mark.parametrize(
    ("rows", "count", "top_k", "hidden", "inner"),
    [(1, 8, 2, 64, 32), (7, 3, 1, 48, 80), (90, 5, 3, 128, 96), (40, 40, 1, 32, 16)],
)
def test_experts_are_as_accurate_as_torch(
    rows: int, count: int, top_k: int, hidden: int, inner: int, library: Library
) -> None:
    torch.manual_seed(rows)
    experts = stacked(count, hidden, inner)
    # No token uses expert 1.
    scores = torch.rand(rows, count).index_fill_(1, torch.tensor([1]), -1.0)
    weights, ids = scores.topk(top_k, dim=-1)
    x = torch.randn(rows, hidden).bfloat16()
    expected = experts(x, ids, weights)
    wide = [experts.w13_weight.float(), experts.w2_weight.float()]  # type: ignore[union-attr]

    use_cpu_kernels(experts, library)
    found = experts(x, ids, weights)

    assert isinstance(experts.moe_op, PackedExperts) and not list(experts.parameters())
    exact = torch.zeros(rows, hidden)
    for row, place in torch.cartesian_prod(torch.arange(rows), torch.arange(top_k)).tolist():
        w13, w2 = (weight[ids[row, place]] for weight in wide)
        gate, up = (w13 @ x[row].float()).chunk(2)
        exact[row] += weights[row, place] * (w2 @ (torch.nn.functional.silu(gate) * up))
    assert_as_accurate(found, expected, exact, 1e-4)
    assert error_of(found, exact) < 0.02 * exact.std()


@torch.inference_mode()
def test_experts_without_a_kernel_are_not_replaced(library: Library) -> None:
    experts = stacked(4, 40, 16)

    use_cpu_kernels(experts, library)

    assert experts.moe_op is None and experts.w13_weight is not None


@torch.inference_mode()
@pytest.mark.parametrize(
    ("architecture", "fields", "has_kernel"),
    # Each token uses all experts, so that rounding does not change the routing.
    [
        ("GptOssForCausalLM", {"num_experts_per_tok": 4}, True),
        ("Llama4ForCausalLM", {"num_experts_per_tok": 4}, True),
        ("PhimoeForCausalLM", {"num_local_experts": 2}, True),
    ],
)
def test_experts_with_biases_or_other_routers_run_on_kernels_in_an_uncompiled_model(
    architecture: str,
    fields: dict[str, Any],
    has_kernel: bool,
    built: Library,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random_checkpoint.register(monkeypatch)
    folder = random_checkpoint.write_random(tmp_path, architecture, **HEADS, **fields)
    exact = decoded(load_decoder(folder))
    model = packed(folder, built)

    found = decoded(model, pad_rows=2, pad_blocks=1)

    assert not model.is_compiled
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert {expert.moe_op is not None for expert in experts} == {has_kernel}
    assert_as_accurate(found, decoded(packed(folder, None)), exact)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "overrides"),
    [("glm4_moe", HEADS), ("olmoe", HEADS), ("deepseek_v2", {"hidden_size": 128})],
)
def test_experts_of_an_uncompiled_model_are_as_accurate_as_torch(
    family: str, overrides: dict[str, Any], library: Library, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, **overrides)
    exact = decoded(load_decoder(folder))
    model = packed(folder, library)

    found = decoded(model, pad_rows=2, pad_blocks=1)

    assert not model.is_compiled
    assert any(isinstance(module, Experts) and module.moe_op for module in model.modules())
    assert_as_accurate(found, decoded(packed(folder, None)), exact)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "qwen2_moe"])
def test_a_prefill_in_chunks_is_as_accurate_as_torch(
    family: str, library: Library, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, **HEADS)

    def chunks(model: CausalLM) -> Tensor:
        harness = PagedHarness(model)
        first = harness.prefill(PROMPTS, pad_rows=1, pad_query=2, pad_blocks=1)
        then = harness.prefill({0: [4, 5, 6], 2: [7]}, pad_blocks=2)
        return torch.cat([*first.values(), *then.values()]).float()

    exact, own = chunks(load_decoder(folder)), chunks(packed(folder, None))
    model = packed(folder, library)

    found = chunks(model)

    error, allowed = (found - exact).square().mean(), (own - exact).square().mean()
    assert model.is_compiled
    assert error.sqrt() < 1.5 * allowed.sqrt() + 1e-3


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"head_dim": 64, "hidden_size": 384, "num_attention_heads": 6}),
        ("qwen3", {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}),
        ("mistral", {**HEADS, "sliding_window": 9}),
        ("mistral", {**HEADS, "sliding_window": 170}),
    ],
)
def test_long_prefills_and_their_second_chunks_are_as_accurate_as_torch(
    family: str, overrides: dict[str, Any], library: Library, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, **overrides)
    tokens = torch.randint(8, 90, (800,), generator=torch.Generator().manual_seed(0)).tolist()

    def chunks(model: CausalLM) -> Tensor:
        harness = PagedHarness(model)
        first = harness.prefill({0: tokens[:333], 1: tokens[333:370], 2: [5]}, pad_rows=1)
        then = harness.prefill({0: tokens[400:540], 1: tokens[540:740]}, pad_blocks=3)
        return torch.cat([*first.values(), *then.values()]).float()

    exact, own = chunks(load_decoder(folder)), chunks(packed(folder, None))
    model = packed(folder, library)

    found = chunks(model)

    error, allowed = (found - exact).square().mean(1), (own - exact).square().mean(1)
    assert model.is_compiled
    assert error.mean().sqrt() < 1.5 * allowed.mean().sqrt() + 1e-3
    assert error.max().sqrt() < 3 * allowed.max().sqrt() + 1e-3


@torch.inference_mode()
def test_prompts_are_processed_in_groups_with_the_same_result(
    library: Library, tmp_path: Path
) -> None:
    folder = make_tiny("llama", tmp_path, head_dim=256, num_attention_heads=4)
    generator = torch.Generator().manual_seed(0)
    # A layer's keys and values take 12 MiB per prompt, so at most two prompts run together.
    prompts = {
        row: torch.randint(8, 90, (3000,), generator=generator).tolist()[:length]
        for row, length in enumerate((40, 3, 64, 17, 50))
    }
    alone = PagedHarness(packed(folder, library), num_blocks=2048)
    expected = {
        row: alone.prefill({row: ids}, pad_blocks=1500)[row] for row, ids in prompts.items()
    }

    found = PagedHarness(packed(folder, library), num_blocks=2048).prefill(prompts, pad_blocks=1500)

    assert all(torch.equal(found[row], expected[row]) for row in prompts)


@torch.inference_mode()
def test_padding_and_other_requests_change_no_bit(library: Library, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, **HEADS)
    together = decoded(packed(folder, library))

    padded = decoded(packed(folder, library), pad_rows=3, pad_blocks=5)
    alone = PagedHarness(packed(folder, library))
    alone.prefill(PROMPTS)
    ones = [alone.decode({row: token})[row].float() for last in NEXT for row, token in last.items()]

    assert torch.equal(padded, together)
    assert torch.equal(torch.stack(ones), together)


@torch.inference_mode()
def test_nan_in_a_request_does_not_affect_other_requests(library: Library, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, **HEADS)
    expected = decoded(packed(folder, library))[:3]
    harness = PagedHarness(packed(folder, library))
    harness.prefill(PROMPTS)
    slot = harness.slot(0, 3)
    for keys, _ in harness.caches:
        keys[slot] = float("nan")

    found = harness.decode(NEXT[0])

    assert found[0].isnan().all()
    assert torch.equal(found[1].float(), expected[1])
    assert torch.equal(found[2].float(), expected[2])


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 16, 17, 33, 500])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (112, 64), (48, 34), (2048, 1536)])
def test_a_product_equals_the_product_of_the_weight(
    outputs: int, inputs: int, rows: int, library: Library
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, bias, hidden = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((outputs, inputs), (outputs,), (rows, inputs))
    )

    linear = PackedLinear(library, weight, bias)

    exact = hidden.double() @ weight.double().T + bias.double()
    sums = linear.multiply_float32(hidden)
    if linear.product.kind == INT16_ROWS:
        assert (sums - exact).norm() < 3e-4 * exact.norm()
    else:
        torch.testing.assert_close(linear(hidden).double(), exact, atol=1e-2, rtol=8e-3)
        torch.testing.assert_close(sums.double(), exact, atol=1e-4, rtol=1e-5)
    assert torch.equal(sums.bfloat16(), linear(hidden))


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13, 100])
@pytest.mark.parametrize("inputs", [32, 64, 96, 1184])
def test_integer_products_are_exact_for_numbers_near_the_largest(
    inputs: int, rows: int, built: Library
) -> None:
    if not built.has_integers:
        pytest.skip("weights in bfloat16 are not multiplied in integers")
    generator = torch.Generator().manual_seed(rows)
    # In each output and in each row, the largest number is at most 32 times the smallest.
    weight = torch.randint(-32, 33, (48, inputs), generator=generator).bfloat16()
    weight *= 2.0 ** torch.randint(-30, 31, (48, 1), generator=generator)
    hidden = torch.randint(-32, 33, (rows, inputs), generator=generator).bfloat16()
    hidden *= 2.0 ** torch.randint(-30, 31, (rows, 1), generator=generator)

    linear = PackedLinear(built, weight, None)

    assert linear.product.kind == INT16_ROWS
    exact = hidden.double() @ weight.double().T
    assert torch.equal(linear.multiply_float32(hidden), exact.float())


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 6, 50])
def test_the_largest_sums_fit_into_integers(rows: int, built: Library) -> None:
    if not built.has_integers:
        pytest.skip("weights in bfloat16 are not multiplied in integers")
    weight, hidden = torch.full((16, 256), 1.9921875), torch.full((rows, 256), -1.9921875)
    linear = PackedLinear(built, weight.bfloat16(), None)

    sums = linear.multiply_float32(hidden.bfloat16())

    assert linear.product.kind == INT16_ROWS
    assert torch.equal(sums, (hidden.double() @ weight.double().T).float())


@pytest.mark.parametrize("value", [300.0, float("inf"), float("nan")])
def test_a_weight_that_integers_would_round_too_much_stays_in_bfloat16(
    value: float, built: Library
) -> None:
    weight = torch.randn(32, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[:, 7] = value
    weight[:, 8] = -value

    linear = PackedLinear(built, weight, None)

    assert linear.product.kind == 0
    sums = linear.multiply_float32(torch.ones(1, 4096).bfloat16())
    if value == 300:
        torch.testing.assert_close(sums, weight.float().sum(1)[None], atol=1e-2, rtol=1e-4)
    else:
        assert not sums.isfinite().any()


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 6, 7, 16, 33, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (112, 64), (2048, 34)])
def test_argmax_returns_the_first_maximum(
    outputs: int, inputs: int, rows: int, library: Library
) -> None:
    generator = torch.Generator().manual_seed(rows)
    # Small integers, so that many outputs are equal.
    weight = torch.randint(-2, 3, (outputs, inputs), generator=generator).bfloat16()
    hidden = torch.randint(-1, 2, (rows, inputs), generator=generator).bfloat16()
    linear = PackedLinear(library, weight, None)
    logits = linear.multiply_float32(hidden)
    assert rows < 33 or (logits == logits.amax(1, keepdim=True)).sum() > rows

    found = linear.argmax(hidden)

    assert found.tolist() == argmax(logits).tokens.flatten().tolist()


@torch.inference_mode()
def test_argmax_of_a_row_that_is_not_finite_is_negative(library: Library) -> None:
    weight = torch.randn(64, 32).bfloat16()
    hidden = torch.randn(5, 32).bfloat16()
    bias = torch.zeros(64).bfloat16()
    hidden[1, 3] = torch.nan
    hidden[3] = -torch.inf
    found = PackedLinear(library, weight, None).argmax(hidden)
    assert [index < 0 for index in found.tolist()] == [False, True, False, True, False]

    bias[17] = torch.inf
    assert PackedLinear(library, weight, bias).argmax(hidden[:1]).tolist() == [-1]
    bias[:] = -torch.inf
    assert PackedLinear(library, weight, bias).argmax(hidden[:1]).tolist() == [-1]
    bias[40] = 0
    assert PackedLinear(library, weight, bias).argmax(hidden[:1]).tolist() == [40]


@torch.inference_mode()
def test_argmax_of_a_model_equals_the_argmax_of_its_logits(
    library: Library, tmp_path: Path
) -> None:
    folder = make_tiny("llama", tmp_path, **HEADS)
    model, torchs = packed(folder, library), packed(folder, None)
    hidden = torch.randn(9, 128).bfloat16()

    found = model.argmax(hidden)

    assert torchs.argmax(hidden) is None
    assert found is not None
    assert torch.equal(found, model.logits(hidden).argmax(1))


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_a_model_that_divides_or_caps_its_logits_has_no_argmax(
    family: str, built: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny(family, tmp_path, **HEADS)
    largest = torch.arange(9)
    monkeypatch.setattr(PackedLinear, "argmax", lambda *given: largest)

    found = packed(folder, built).argmax(torch.randn(9, 128).bfloat16())

    assert found is (largest if family == "llama" else None)


def test_a_greedy_request_gets_the_same_tokens_with_and_without_logits(
    built: Library, kernel_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("llama", tmp_path / "model", **HEADS)
    (tmp_path / "kernels").symlink_to(kernel_folder)
    argmax, calls = PackedLinear.argmax, []
    monkeypatch.setattr(PackedLinear, "argmax", lambda *given: calls.append(1) or argmax(*given))
    said = []
    for sampling in (GREEDY, RequestSampling(temperature=0.0, num_logprobs=0)):
        rig = WorkerRig(folder, dtype="bfloat16", cache_dir=str(tmp_path))
        calls.clear()
        rig.admit(0, list(range(20, 50)))
        rig.admit(1, [44, 45, 46], sampling=sampling)
        rig.prefill({0: None, 1: None})
        rig.step()
        rig.run([0, 1], 9)
        rig.worker.close()
        said.append((rig.requests[0].sampled, rig.requests[1].sampled))
        assert len(calls) == (10 if sampling is GREEDY else 0)

    assert said[0] == said[1]


def test_sizes_without_a_kernel_run_on_torch(built: Library, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)

    model = packed(folder, built)
    decoded(model)

    assert not model.is_compiled


def _layers(**fields: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(
        spec, layers=tuple(layer._replace(**fields) for layer in spec.layers)
    )


@pytest.mark.parametrize(
    "change",
    [
        _layers(chunk=8),
        _layers(rope="none"),
        _layers(sinks=True),
        _layers(qk_norm=False),
        lambda spec: replace(spec, attention_soft_cap=5.0),
        lambda spec: replace(spec, alibi_max_bias=8.0),
        lambda spec: replace(spec, temperature=TemperatureTuning(0.1, 8)),
        lambda spec: replace(spec, qk_norm="unweighted"),
        lambda spec: replace(spec, qk_norm_after_rope=True),
    ],
)
def test_attention_unsupported_by_the_library_runs_on_torch(
    change: Callable[[DecoderSpec], DecoderSpec],
    built: Library,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_tiny("llama", tmp_path, **HEADS)
    assert packed(folder, built).is_compiled
    config = read_model_config(str(folder))
    spec = change(ARCHITECTURES[config.architecture].make_spec(config))
    model = Decoder(
        config, spec, ModelBuild(dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=64)
    )

    found = use_cpu_kernels(model, built)

    assert isinstance(found, CompiledDecoder) and not found.is_compiled


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("gemma", {**HEADS, "hidden_act": "silu", "initializer_range": 0.3}),
        ("gemma3_text", {**HEADS, "hidden_activation": "silu", "initializer_range": 0.3}),
        ("mpt", HEADS),
        ("olmo2", {**HEADS, "hidden_size": 128}),
        ("glm4", {**HEADS, "head_dim": 64}),
        ("cohere", {**HEADS, "logit_scale": 1.0}),
        ("stablelm", {**HEADS, "rope_parameters": WHOLE_HEADS}),
        ("smollm3", {**HEADS, "no_rope_layers": [1, 0]}),
        ("starcoder2", {**HEADS, "hidden_act": "silu"}),
        ("gpt2", {**HEADS, "n_inner": 128, "activation_function": "silu"}),
    ],
)
@torch.inference_mode()
def test_layer_layouts_that_the_library_lacks_run_on_torch(
    family: str, overrides: dict[str, Any], built: Library, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, **overrides)
    exact = decoded(load_decoder(folder))
    model = packed(folder, built)

    found = decoded(model)

    assert not model.is_compiled
    assert_as_accurate(found, decoded(packed(folder, None)), exact)


def test_a_second_start_compiles_nothing(
    built: Library, kernel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_module, "COMPILERS", ("no-such-compiler",))

    assert open_library(kernel_folder, 1) is not None


def test_without_a_working_compiler_torchs_operators_are_used(
    built: Library,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    broken.chmod(0o755)

    with caplog.at_level("INFO", logger="hpu.native.library"):
        monkeypatch.setattr(library_module, "COMPILERS", (str(broken),))
        assert open_library(tmp_path / "one", 1) is None
        monkeypatch.setattr(library_module, "COMPILERS", ("no-such-compiler",))
        assert open_library(tmp_path / "two", 1) is None

    assert ": out of luck; " in caplog.text
    assert "there is no C++ compiler" in caplog.text
    assert not list(tmp_path.glob("one/*"))
