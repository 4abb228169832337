"""GaudiBackend on the emulated card: the CPU's tokens in each mode, and the backend's reports. Only
the card is emulated; the tested file is the shipped file."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import random_checkpoint
import torch
from emulated import emulated
from gaudi_machine import GaudiMachine
from greedy import assert_greedy_within, load_reference
from paged_harness import load_decoder
from strict_card import assert_nothing_compiles_after_warmup
from tiny_models import make_tiny
from two_prompts import PROMPTS, greedy, working
from worker_rig import BLOCK_SIZE

from config.engine import EngineConfig
from config.errors import ConfigError
from config.execution import HPU_GRAPHS, EmulatorSettings, ExecutionConfig, ModeChoice
from config.loading.sources import load
from config.model.model_config import ModelConfig
from hpu.backends import gaudi_copies
from hpu.backends.gaudi import CardFacts, GaudiBackend
from hpu.backends.select import select_backend
from hpu.doctor.errors import explain
from hpu.emulator.card.device import EmulatedDevice
from hpu.emulator.settings import EmulatorConfig
from hpu.gaudi_devices import BOTH, KERNELS, Kernel
from hpu.profiling.diagnostics import Diagnostics
from hpu.protocol import DECODE, RequestSampling, StepPlan
from hpu.runner.counters import Counters
from hpu.sampling.sampler import FUSED_SETTINGS
from hpu.worker.load import choose_dtype
from hpu.worker.profile_run import measure_peak
from hpu.worker.serving import Serving


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "granite", "phi3"])
def test_captured_graphs_of_each_family_give_the_tokens_of_the_cpu(
    family: str, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path)
    with working(folder) as on_cpu:
        expected = greedy(on_cpu)

    with working(folder, device="hpu-emulator") as rig:
        found = greedy(rig)
        counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]

    assert found == expected
    widths = {batch for phase, batch, *_ in rig.ready.buckets if phase == DECODE}
    assert counts["captures"] == len(rig.ready.buckets) + len(widths) * len(FUSED_SETTINGS)
    # Includes replays of the model and of the sampler.
    assert counts["replays"] > 2 * 12


EXPERTS = {
    # Softmax routing, a gated shared expert, and a dense layer.
    "qwen2_moe": {"mlp_only_layers": [0]},
    # Sigmoid routing with a correction bias, groups, a scaling factor and a shared expert.
    "glm4_moe": {},
    # Query and key norms over all heads.
    "olmoe": {},
}
ONLY_EXPERTS = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
"""A single MoE layer: each kind of layer is compiled for each bucket, so more kinds take longer."""


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("qwen2_moe", "hpu-graphs"),
        pytest.param("qwen2_moe", "torch-compile", marks=pytest.mark.slow),
        ("glm4_moe", "hpu-graphs"),
        pytest.param("glm4_moe", "torch-compile", marks=pytest.mark.slow),
        ("olmoe", "hpu-graphs"),
    ],
)
def test_experts_give_the_tokens_of_the_cpu_and_compile_nothing_after_warmup(
    family: str, mode: str, tmp_path: Path
) -> None:
    fields = EXPERTS[family] if mode == "hpu-graphs" else ONLY_EXPERTS
    folder = make_tiny(family, tmp_path, **fields)

    assert_nothing_compiles_after_warmup(folder, ExecutionConfig(mode=mode))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hpu-graphs", "torch-compile"])
def test_block_selection_gives_the_tokens_of_the_cpu_and_compiles_nothing_after_warmup(
    mode: str, tmp_path: Path
) -> None:
    folder = make_tiny("minimax_m3_vl_text", tmp_path, index_block_size=BLOCK_SIZE)

    assert_nothing_compiles_after_warmup(folder, ExecutionConfig(mode=mode))


DENSE: dict[str, dict[str, Any]] = {
    # Norms in float32, and scaled embeddings.
    "gemma": {"head_dim": 16, "initializer_range": 0.3},
    # Norms before and after each block and per head, separate RoPE parameters for each layer type,
    # a window, and capped logits.
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 5.0,
        "initializer_range": 0.3,
    },
    # Norms after attention and MLP.
    "olmo2": {},
    # Norms before and after each block, and RoPE on half of each head.
    "glm4": {"head_dim": 16},
    # A shared layer norm for attention and MLP, norms per head, no bias.
    "cohere": {"use_qk_norm": True, "logit_scale": 0.75},
    # Two layer norms and an MLP without a gate.
    "gpt_neox": {},
    # Learned position embeddings without RoPE, and a single KV head.
    "gpt_bigcode": {"n_inner": 128},
    # One layer without RoPE.
    "smollm3": {"no_rope_layers": [1, 0]},
}
COMPILED = ("gemma", "gemma3_text", "gpt_neox", "gpt_bigcode", "smollm3")
"""Families that also run under torch-compile, in slow tests; MIXED has most of their kinds of
layers."""
MIXED = ("BiasedForCausalLM", "SinksForCausalLM")
"""Kinds of layers that no single family combines."""


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *((family, "hpu-graphs") for family in DENSE),
        *(pytest.param(family, "torch-compile", marks=pytest.mark.slow) for family in COMPILED),
    ],
)
def test_each_layer_layout_gives_the_tokens_of_the_cpu_and_compiles_nothing_after_warmup(
    family: str, mode: str, tmp_path: Path
) -> None:
    folder = make_tiny(family, tmp_path, **DENSE[family])

    assert_nothing_compiles_after_warmup(folder, ExecutionConfig(mode=mode))


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [
        *((architecture, "hpu-graphs") for architecture in MIXED),
        pytest.param("BiasedForCausalLM", "torch-compile", marks=pytest.mark.slow),
        pytest.param("SinksForCausalLM", "torch-compile", marks=pytest.mark.slow),
    ],
)
def test_mixed_layer_kinds_give_the_tokens_of_the_cpu_and_compile_nothing_after_warmup(
    architecture: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint.register(monkeypatch)
    folder = random_checkpoint.write_random(tmp_path, architecture)

    assert_nothing_compiles_after_warmup(folder, ExecutionConfig(mode=mode))


@pytest.mark.parametrize(
    ("architecture", "fields", "has_kernel", "mode"),
    [
        # Experts with biases and the clamped activation: on the vendor's kernel, and on releases
        # without it.
        ("GptOssForCausalLM", {"swiglu_limit": 7.0}, True, "hpu-graphs"),
        pytest.param(
            *("GptOssForCausalLM", {"swiglu_limit": 7.0}, True, "torch-compile"),
            marks=pytest.mark.slow,
        ),
        ("GptOssForCausalLM", {}, False, "hpu-graphs"),
        # Routing weights applied to the inputs of the experts, a shared expert, and a dense layer.
        ("Llama4ForCausalLM", {"num_experts_per_tok": 2}, False, "hpu-graphs"),
        # Two experts per token, chosen in sequence.
        ("PhimoeForCausalLM", {}, False, "hpu-graphs"),
        # A model that combines all these features.
        pytest.param("CombinedForCausalLM", {}, False, "torch-compile", marks=pytest.mark.slow),
    ],
)
def test_random_moe_checkpoints_give_the_tokens_of_the_cpu_and_compile_nothing_after_warmup(
    architecture: str,
    fields: dict[str, Any],
    has_kernel: bool,
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random_checkpoint.register(monkeypatch)
    if mode == "torch-compile":
        fields = {**fields, "num_hidden_layers": 1}
    folder = random_checkpoint.write_random(tmp_path, architecture, **fields)
    if has_kernel:
        kernel = Kernel(BOTH, ())
        monkeypatch.setitem(KERNELS, "mixture_of_experts.bias_fused_weights", kernel)

    assert_nothing_compiles_after_warmup(folder, ExecutionConfig(mode=mode))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"execution": ExecutionConfig(mode="torch-compile")}, marks=pytest.mark.slow),
        pytest.param(
            {"execution": ExecutionConfig(mode="torch-compile", regional_compilation=False)},
            marks=pytest.mark.slow,
        ),
        {"execution": ExecutionConfig(mode="eager")},
        {"execution": ExecutionConfig(mode="lazy", layers_per_recipe=2)},
        {"execution": ExecutionConfig(fused_sdpa=False, split_qkv=True)},
        {"emulator": EmulatorSettings(card="gaudi3")},
    ],
    ids=["compile", "whole", "eager", "lazy", "unfused", "gaudi3"],
)
def test_every_mode_and_card_gives_the_same_tokens(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    mode = settings.get("execution", ExecutionConfig())
    # If the model is compiled as a whole, torch traces each layer for each bucket, so a single
    # layer is enough.
    fields = {} if mode.regional_compilation else {"num_hidden_layers": 1}
    folder = make_tiny("qwen3", tmp_path, **fields)
    with working(folder) as on_cpu:
        expected = greedy(on_cpu)

    with working(folder, device="hpu-emulator", **settings) as rig:
        found = greedy(rig)

    assert found == expected


WINDOWS_IN_SOME_LAYERS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}


@pytest.mark.parametrize(
    "mode", ["hpu-graphs", pytest.param("torch-compile", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("family", "fields"), [("llama", {}), ("qwen2", WINDOWS_IN_SOME_LAYERS)], ids=["full", "both"]
)
def test_attention_in_slices_gives_the_same_tokens(
    family: str,
    fields: dict[str, Any],
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_tiny(family, tmp_path, **fields)
    with working(folder) as on_cpu:
        expected = greedy(on_cpu)
    # 64 new and 32 * 8 cached tokens: two slices of the new tokens, six of the cached tokens.
    monkeypatch.setattr(ExecutionConfig, "slice_sizes", (100, 48))

    settings = {
        "execution": ExecutionConfig(mode=mode),
        "emulator": EmulatorSettings(is_strict=True),
    }
    with working(folder, device="hpu-emulator", **settings) as rig:
        found = greedy(rig)

    assert found == expected


def test_graphs_with_float32_attention_scores_give_the_tokens_of_eager_mode(tmp_path: Path) -> None:
    folder = make_tiny("qwen2", tmp_path)
    found = []

    for mode in ("eager", "hpu-graphs"):
        execution = ExecutionConfig(mode=mode)
        with working(folder, device="hpu-emulator", dtype="bfloat16", execution=execution) as rig:
            found.append(greedy(rig))

    assert found[0] == found[1]


DRAWN = RequestSampling(temperature=0.7, top_p=0.9, seed=3)
PENALIZED = RequestSampling(temperature=0.7, seed=3, presence_penalty=0.5, bad_words=((1, 2),))


@pytest.mark.parametrize(
    ("family", "mode", "sampling"),
    [
        ("llama", "hpu-graphs", DRAWN),
        ("qwen3", "hpu-graphs", RequestSampling(temperature=0.0)),
        ("llama", "lazy", PENALIZED),
        pytest.param("llama", "torch-compile", DRAWN, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("decodes", [1, 4])
def test_no_upload_waits_for_a_launch_while_requests_decode(
    family: str, mode: str, sampling: RequestSampling, decodes: int, tmp_path: Path
) -> None:
    with working(
        make_tiny(family, tmp_path),
        device="hpu-emulator",
        execution=ExecutionConfig(mode=mode),
        emulator=EmulatorSettings(is_strict=True),
        max_num_seqs=2,
        num_scheduler_steps=decodes,
    ) as rig:
        counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
        for req_index, prompt in enumerate(PROMPTS):
            rig.admit(req_index, prompt, sampling=sampling)
        rig.prefill({0: None, 1: None})
        rig.step()

        def submit() -> None:
            for _ in range(decodes):
                rig.decode([0, 1])
            rig.submit()

        # The buffers of an unprepared bucket are created at its first use.
        for _ in range(2):
            submit()
            rig.collect()
        captures, waits = counts["captures"], counts["upload_waits"]
        submit()
        for _ in range(10 // decodes):
            submit()
            rig.collect()
        rig.collect()

        assert counts["upload_waits"] == waits
        assert counts["captures"] == captures


def test_a_replay_reads_its_given_tensors() -> None:
    backend = select_backend(
        EngineConfig("m", device="hpu-emulator", emulator=EmulatorSettings(is_strict=True))
    )
    x, other = backend.zeros((4,), torch.float32), backend.zeros((4,), torch.float32).add_(5)
    graph = backend.capture(lambda x: x.split(2)[1] * 2, (x.clone(),))

    first = graph.replay(other).cpu().tolist()
    second = graph.replay(x).cpu().tolist()

    assert (first, second) == ([10.0, 10.0], [0.0, 0.0])
    backend.close()


@pytest.mark.parametrize(
    ("window", "card", "mode"),
    [
        *((window, card, "hpu-graphs") for window in (None, 24) for card in ("gaudi2", "gaudi3")),
        *(
            pytest.param(window, card, "torch-compile", marks=pytest.mark.slow)
            for window in (None, 24)
            for card in ("gaudi2", "gaudi3")
        ),
    ],
)
def test_float16_gives_the_most_likely_tokens(
    window: int | None, card: str, mode: str, tmp_path: Path
) -> None:
    folder = make_tiny("mistral", tmp_path, sliding_window=window)
    settings = {
        "execution": ExecutionConfig(mode=mode),
        "emulator": EmulatorSettings(card=card, is_strict=True),
    }

    with working(folder, device="hpu-emulator", dtype="float16", **settings) as rig:
        found = greedy(rig)

    assert rig.ready.dtype == "float16"
    assert_greedy_within(0.01, list(PROMPTS), found, load_reference(folder))


def test_a_float16_checkpoint_runs_in_bfloat16_by_default() -> None:
    backend = select_backend(EngineConfig("m", device="hpu-emulator"))

    facts = ModelConfig("m", "LlamaForCausalLM", 64, 64, 64, 1, 4, 2, 16, max_position=64)
    facts = dataclasses.replace(facts, dtype="float16")

    assert choose_dtype("auto", facts, backend) == torch.bfloat16
    assert choose_dtype("float16", facts, backend) == torch.float16
    backend.close()


@pytest.mark.parametrize(
    ("family", "card", "dtype", "adjusts", "softmax_mode"),
    [
        ("llama", "gaudi3", torch.bfloat16, True, "fast"),
        ("llama", "gaudi2", torch.bfloat16, False, "fast"),
        ("llama", "gaudi3", torch.float16, False, "fp32"),
        ("qwen2", "gaudi3", torch.bfloat16, False, "fp32"),
        ("qwen3", "gaudi3", torch.bfloat16, True, "fast"),
    ],
)
def test_attention_uses_the_kernels_that_the_vendors_plugin_uses(
    family: str, card: str, dtype: torch.dtype, adjusts: bool, softmax_mode: str, tmp_path: Path
) -> None:
    model = load_decoder(make_tiny(family, tmp_path), dtype=dtype)
    backend = select_backend(
        EngineConfig("m", device="hpu-emulator", emulator=EmulatorSettings(card=card))
    )

    backend.prepare(model)

    implementations = [layer.self_attn.attn.impl for layer in model.layers]
    found = {implementation.block_softmax for implementation in implementations}
    assert found == {"adjustment" if adjusts else "index_reduce"}
    assert {implementation.softmax_mode for implementation in implementations} == {softmax_mode}
    backend.close()


@pytest.mark.parametrize("details", ["0", "1"])
def test_compiled_recipes_equal_the_runtimes_record(details: str) -> None:
    with emulated(compile_delay_s=0.001, variables={"PT_HPU_METRICS_GC_DETAILS": details}):
        backend = GaudiBackend(ExecutionConfig(), ModeChoice(HPU_GRAPHS, ""))
        metrics = backend.runtime_metrics
        known, before = len(metrics.compiled_recipes()), metrics.compilations()

        torch.ones(3, device="hpu").mul(2).cpu()

        new = metrics.compiled_recipes()[known:]
        compiled = metrics.compilations() - before
        assert compiled > 0 and len(new) == (compiled if details == "1" else 0)
        assert all(name and microseconds >= 1000 for name, microseconds in new)
        backend.close()


class Patcher:
    """Fake compressor that replaces no module."""

    weight_width = 1

    def patch(self, model: torch.nn.Module) -> None:
        return

    def finish(self, model: torch.nn.Module) -> None:
        return

    def quantizes_cache(self, model: torch.nn.Module) -> bool:
        return False


@pytest.mark.parametrize("name", ["hpu_inference_initialize", "hpu_initialize"])
@pytest.mark.parametrize("value", ["false", "true", None])
def test_compressor_scales_are_constants_unless_the_variable_disables_them(
    value: str | None,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = load_decoder(make_tiny("llama", tmp_path, num_hidden_layers=1), dtype=torch.bfloat16)
    environ = {} if value is None else {"VLLM_DISABLE_MARK_SCALES_AS_CONST": value}
    words = ["m", "--device=hpu-emulator", "--execution-mode=lazy", "--split-qkv"]
    backend = select_backend(load(words, environ=environ).engine)
    marked = []
    core = backend._htcore  # type: ignore[attr-defined]
    if name == "hpu_initialize":
        # A release without the newer names.
        monkeypatch.delattr(core, "hpu_inference_initialize")
        monkeypatch.delattr(core, "hpu_inference_set_env")
    monkeypatch.setattr(core, name, lambda model, **given: marked.append(given))

    backend.begin_load(Patcher())
    backend.prepare(model, Patcher())

    constants = [{"mark_only_scales_as_const": True}]
    assert marked == ([] if value == "true" else constants)
    # A compressor replaces the projections, so that --split-qkv has no effect.
    assert "--split-qkv has no effect on 1 of 1 layers" in caplog.text
    backend.close()


@pytest.mark.parametrize(("family", "keeps"), [("llama", False), ("qwen3", True)])
def test_graphs_keep_intermediate_tensors_only_for_families_that_need_them(
    family: str, keeps: bool, tmp_path: Path
) -> None:
    model = load_decoder(make_tiny(family, tmp_path))
    backend = select_backend(
        EngineConfig("m", device="hpu-emulator", emulator=EmulatorSettings(is_strict=True))
    )
    backend.prepare(model)
    x = backend.zeros((1 << 18,), torch.float32)
    before = backend.memory()[0]

    graph = backend.capture(lambda x: ((x + 1) * 2).sum(), (x,))

    held = before - backend.memory()[0] - EmulatorConfig().graph_bytes
    assert (held > 2 * x.numel() * 4) == keeps
    assert float(graph.replay(x).cpu()) == 2 * x.numel()
    backend.close()


def test_memory_of_weights_is_no_part_of_the_peak_of_launches() -> None:
    backend = select_backend(EngineConfig("m", device="hpu-emulator"))
    weights = backend.zeros((1 << 20,), torch.float32)
    backend.reset_peak()
    assert backend.peak_memory() == backend.memory()[1] - backend.memory()[0]

    peak = measure_peak(lambda: backend.zeros((1 << 10,), torch.float32), backend)

    assert 4 << 10 <= peak < weights.numel() * 4
    backend.close()


def test_graphs_with_lazy_mode_off_are_refused_before_the_runtime_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    config = EngineConfig("m", device="hpu-emulator", execution=ExecutionConfig(mode="hpu-graphs"))

    with pytest.raises(ConfigError, match="PT_HPU_LAZY_MODE is '0': this mode needs 1"):
        select_backend(config)

    assert not hasattr(torch, "hpu")


def test_hpu_is_refused_on_a_machine_without_cards() -> None:
    with pytest.raises(ConfigError, match="habana"):
        select_backend(EngineConfig("m", device="hpu"))


def test_out_of_memory_is_distinguished_from_other_errors() -> None:
    backend = select_backend(
        EngineConfig("m", device="hpu-emulator", emulator=EmulatorSettings(memory_bytes=1 << 24))
    )

    with pytest.raises(RuntimeError) as caught:
        backend.zeros((1 << 25,), torch.float32)

    assert backend.is_out_of_memory(caught.value)
    assert not backend.is_out_of_memory(RuntimeError("shape mismatch"))
    assert backend.memory()[0] > 0
    backend.close()


def test_a_copy_to_the_host_is_complete_at_the_next_event_even_if_its_source_changes() -> None:
    backend = select_backend(
        EngineConfig("m", device="hpu-emulator", emulator=EmulatorSettings(is_strict=True))
    )
    early = backend.event()
    source = backend.zeros((4,), torch.float32).add_(7)

    copy = backend.to_host(source)
    del source
    early.wait()
    assert copy.isnan().all()
    backend.zeros((4,), torch.float32)
    backend.event().wait()

    assert copy.tolist() == [7.0] * 4
    backend.close()


def test_launches_run_after_a_failed_capture() -> None:
    backend = select_backend(
        EngineConfig("m", device="hpu-emulator", emulator=EmulatorSettings(is_strict=True))
    )
    device = torch.hpu.emulated  # type: ignore[attr-defined]
    device.config = dataclasses.replace(device.config, max_graph_ops=2)
    x = backend.zeros((4,), torch.float32)

    with pytest.raises(RuntimeError, match="Graph compile failed") as caught:
        backend.capture(lambda x: ((x + 1) * 2 - 1).abs(), (x,))
    x.add_(5)

    assert backend.is_compile_failure(caught.value)
    assert not backend.is_out_of_memory(caught.value)
    assert x.cpu().tolist() == [5.0] * 4
    backend.close()


def test_memory_of_a_failed_capture_is_freed_before_the_next_capture() -> None:
    """The card has room for the start-up test graph, but not for this graph in addition."""
    settings = EmulatorSettings(memory_bytes=19 << 20, is_strict=True)
    backend = select_backend(EngineConfig("m", device="hpu-emulator", emulator=settings))

    def forward(x: torch.Tensor) -> torch.Tensor:
        # Only the garbage collector can free the second tensor.
        frame, cycle = x + 1, [x * 2]
        cycle.append(cycle)  # type: ignore[arg-type]
        return torch.cat([frame, cycle[0], x])

    x = backend.zeros((1 << 20,), torch.float32)

    with pytest.raises(RuntimeError, match="Allocation") as caught:
        backend.capture(forward, (x,))

    assert backend.is_out_of_memory(caught.value)
    assert x.add_(5).sum().cpu() == 5 << 20
    backend.close()


def test_a_card_without_memory_for_any_capture_is_reported_with_both_errors() -> None:
    settings = EmulatorSettings(memory_bytes=12 << 20)
    backend = select_backend(EngineConfig("m", device="hpu-emulator", emulator=settings))
    x = backend.zeros((1 << 20,), torch.float32)

    with pytest.raises(
        ConfigError,
        match=r"every graph capture after a failed capture fails \(.*Allocation failed.*\): .*"
        r"Allocation failed.*lower --gpu-memory-utilization",
    ):
        backend.capture(lambda x: x + 1, (x,))
    backend.close()


def test_launches_run_after_a_failed_capture_of_a_function() -> None:
    backend = select_backend(
        EngineConfig("m", device="hpu-emulator", emulator=EmulatorSettings(is_strict=True))
    )
    device = torch.hpu.emulated  # type: ignore[attr-defined]
    device.config = dataclasses.replace(device.config, max_graph_ops=2)
    x = backend.zeros((4,), torch.float32)

    with pytest.raises(RuntimeError, match="Graph compile failed"):
        backend.capture(lambda x: ((x + 1) * 2 - 1).abs(), (x,))
    x.add_(5)

    assert x.cpu().tolist() == [5.0] * 4
    backend.close()


def test_an_operator_without_a_kernel_prevents_the_capture() -> None:
    backend = select_backend(EngineConfig("m", device="hpu-emulator"))
    device = torch.hpu.emulated  # type: ignore[attr-defined]
    device.config = dataclasses.replace(device.config, unsupported=frozenset(["aten::isnan"]))
    x = backend.zeros((4,), torch.float32)

    with pytest.raises(RuntimeError, match="cpu fallback") as caught:
        backend.capture(lambda x: x.isnan(), (x,))
    x.add_(5)

    assert backend.is_compile_failure(caught.value)
    assert x.cpu().tolist() == [5.0] * 4
    backend.close()


def test_a_captured_function_reads_its_arguments_and_is_freed_after_warmup() -> None:
    backend = select_backend(
        EngineConfig("m", device="hpu-emulator", emulator=EmulatorSettings(is_strict=True))
    )
    some, other = backend.zeros((4,), torch.float32), backend.zeros((4,), torch.float32).add_(3)
    # The workspace is allocated with the first recipe.
    assert (other * 2 + 1).cpu().tolist() == [7.0] * 4
    before = backend.memory()[0]

    captured = backend.capture(lambda x: x * 2 + 1, (some,))
    found = [captured.replay(x).cpu().tolist() for x in (other, some.add_(1))]
    taken = before - backend.memory()[0]
    del captured
    backend.begin_warmup()

    assert found == [[7.0] * 4, [3.0] * 4]
    assert taken > 0 and backend.memory()[0] == before
    backend.close()


@pytest.mark.parametrize(
    ("mode", "operations"), [("hpu-graphs", 0), ("lazy", 0), ("torch-compile", 0), ("eager", 3)]
)
def test_a_compiled_function_is_one_recipe(mode: str, operations: int) -> None:
    backend = select_backend(
        EngineConfig("m", device="hpu-emulator", execution=ExecutionConfig(mode=mode))
    )
    counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
    x = backend.zeros((4,), torch.float32)
    function = backend.compiled(lambda x: (x + 1) * 2 - 1)
    backend.synchronize()
    before = counts["launches"]

    found = function(x)

    assert counts["launches"] - before == (operations or 1)
    assert found.cpu().tolist() == [1.0] * 4
    backend.close()


@pytest.mark.parametrize(
    ("mode", "launches"), [("hpu-graphs", 1), ("lazy", 1), ("torch-compile", 2), ("eager", 2)]
)
def test_the_end_of_a_recipe_context_launches_its_work_as_one_recipe(
    mode: str, launches: int
) -> None:
    backend = select_backend(
        EngineConfig("m", device="hpu-emulator", execution=ExecutionConfig(mode=mode))
    )
    counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
    x = backend.zeros((4,), torch.float32)
    backend.synchronize()
    before = counts["launches"]

    with backend.recipe:
        x.add_(1)
        x.mul_(3)

    assert counts["launches"] - before == launches
    assert x.cpu().tolist() == [3.0] * 4
    backend.close()


def test_a_recipe_context_that_an_error_ends_launches_nothing() -> None:
    backend = select_backend(EngineConfig("m", device="hpu-emulator"))
    counts = torch.hpu.emulated.counters.counts  # type: ignore[attr-defined]
    x = backend.zeros((4,), torch.float32)
    backend.synchronize()
    before = counts["launches"]

    with pytest.raises(ValueError, match="three"), backend.recipe:
        x.add_(1)
        raise ValueError("three")

    assert counts["launches"] == before
    backend.close()


def test_a_process_that_runs_nothing_after_a_failed_capture_is_reported() -> None:
    backend = select_backend(EngineConfig("m", device="hpu-emulator"))
    device = torch.hpu.emulated  # type: ignore[attr-defined]
    device.config = dataclasses.replace(device.config, max_graph_ops=0)

    with pytest.raises(ConfigError, match="every graph capture after a failed capture fails"):
        backend.capture(lambda x: x + 1, (backend.zeros((4,), torch.float32),))
    backend.close()


def test_a_copy_that_arrives_after_its_event_is_waited_for() -> None:
    backend = select_backend(
        EngineConfig("m", device="hpu-emulator", emulator=EmulatorSettings(late_copy_s=0.05))
    )
    source = torch.arange(64, dtype=torch.int32).to(backend.device)

    for number in range(20):
        copies = [backend.to_host(source + number), backend.to_host((source + number).float())]
        event = backend.event()
        while number % 2 and not event.done():
            pass
        event.wait()

        expected = [number + i for i in range(64)]
        assert copies[0].tolist() == copies[1].tolist() == expected

    copy = backend.to_host(source)
    backend.synchronize()
    assert copy.tolist() == list(range(64))
    backend.close()


def test_a_copy_that_never_arrives_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gaudi_copies, "ARRIVAL_TIMEOUT_S", 0.05)
    backend = select_backend(
        EngineConfig("m", device="hpu-emulator", emulator=EmulatorSettings(late_copy_s=3600.0))
    )

    copy = backend.to_host(torch.arange(4, dtype=torch.int32).to(backend.device))
    backend.event().wait()

    assert copy.tolist() == [0, 1, 2, 3]
    assert "1 copies to the host have not arrived" in caplog.text
    backend.close()


def test_a_large_upload_is_complete_before_its_source_changes() -> None:
    settings = EmulatorSettings(late_copy_s=0.05, is_strict=True)
    backend = select_backend(EngineConfig("m", device="hpu-emulator", emulator=settings))
    host = backend.host_tensor(1 << 18, torch.int32).fill_(7)
    target = backend.zeros((1 << 18,), torch.int32)

    backend.upload(target, host)
    backend.event().wait()
    host.fill_(8)
    backend.synchronize()

    assert bool((target == 7).all())
    backend.close()


def test_without_a_gaudi_the_vendors_packages_are_not_imported() -> None:
    import sys

    select_backend(EngineConfig("m", device="auto", num_threads=1))

    assert "hpu.backends.gaudi" not in sys.modules or not hasattr(torch, "hpu")
    assert not any(name.startswith("habana_frameworks") for name in sys.modules)


def test_the_first_operation_that_fails_names_driver_and_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = GaudiMachine(tmp_path)
    machine.driver = "1.20.0-bd4b6a8"

    def fail(self: Any, *_: Any) -> None:
        raise RuntimeError("Graph compile failed. 26")

    monkeypatch.setattr(EmulatedDevice, "synchronize", fail)
    with (
        emulated(),
        pytest.raises(
            ConfigError, match=r"could not be.*driver is 1\.20\.0-bd4b6a8, the runtime 1\.22"
        ),
    ):
        GaudiBackend(
            ExecutionConfig(),
            ModeChoice("hpu-graphs", ""),
            facts=CardFacts(explain=lambda text: explain(text, machine.seen())),
        )


@pytest.mark.parametrize(
    ("mode", "names_the_other"), [("hpu-graphs", True), ("lazy", True), ("torch-compile", False)]
)
def test_an_error_of_the_card_in_lazy_mode_names_the_other_mode(
    mode: str, names_the_other: bool
) -> None:
    backend = select_backend(
        EngineConfig("m", device="hpu-emulator", execution=ExecutionConfig(mode=mode))
    )
    components: Any = SimpleNamespace(runner=Failing())
    unused: Any = None
    serving = Serving(backend, components, unused, Diagnostics(), unused, Counters())

    with pytest.raises(RuntimeError, match=r"synLaunch failed") as caught:
        serving.submit(StepPlan(0, []))

    assert ("--execution-mode torch-compile" in str(caught.value)) == names_the_other
    backend.close()


class Failing:
    """A runner whose launches fail."""

    def submit(self, plan: StepPlan) -> None:
        raise RuntimeError("synLaunch failed")
