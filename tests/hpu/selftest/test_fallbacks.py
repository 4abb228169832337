"""A model on an emulated card that breaks an assumption: with the settings that the failed check
selects, its tokens equal the CPU's; without them, they are wrong, or the model does not start."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from quantized_checkpoints import FORMATS, make_quantized
from tiny_models import make_tiny
from two_prompts import SLICE, greedy, working

from config.errors import ConfigError
from config.loading.sources import Loaded, load
from engine.selftest.fallbacks import shown
from engine.selftest.results import SelfTest, result_of
from engine.selftest.start import choices_for, identity_of
from hpu.doctor.machine import Machine
from hpu.selftest.base import FAILS, all_checks


class Case(NamedTuple):
    """A fault, and a model that depends on its assumption."""

    fault: str
    family: str = "llama"
    words: tuple[str, ...] = ()
    """Flags of the server."""
    is_slow: bool = True
    fields: tuple[tuple[str, Any], ...] = ()
    """Fields of the model's config."""
    breaks: bool = True
    """Whether greedy tokens are wrong without the fallback; otherwise only speed, sampled tokens or
    memory suffer."""
    dtype: str = "float32"
    """Dtype of the model. In float32, the tokens must equal the CPU's; in other dtypes, the tokens
    of a card without the fault."""


WIDE: dict[str, Any] = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CASES = (
    Case("graph-replay"),
    Case("graph-cache-writes", is_slow=False),
    Case("graph-inputs"),
    Case("graph-outputs"),
    Case("graph-views"),
    Case("graph-marks"),
    Case("graph-cache-views", breaks=False),
    Case("graph-cache-slices", words=("--no-enable-prefix-caching",)),
    Case("graph-state-updates", "qwen3_next", ("--no-enable-prefix-caching",)),
    Case("graph-sampler", breaks=False),
    Case("graph-failures", breaks=False),
    Case("fused-sdpa", is_slow=False),
    # bfloat16, because float32 has no mode of this softmax and no block softmax.
    Case("fused-sdpa-float32", "qwen2", dtype="bfloat16"),
    Case("fused-sdpa-mask"),
    Case("fused-sdpa-statistics", "gpt_oss"),
    Case("fused-sdpa-wide", "deepseek_v3", fields=tuple(WIDE.items())),
    Case("products-of-views", "deepseek_v3"),
    Case("block-softmax", words=("--emulator-card", "gaudi3"), dtype="bfloat16"),
    Case("rms-norm"),
    Case("rotary"),
    Case("experts", "qwen2_moe"),
    Case("experts-in-a-call", "qwen2_moe", fields=(("num_experts", 72),)),
    Case("router-operators", "phimoe", breaks=False),
    Case("cache-writes"),
    Case("exact-comparisons"),
    Case("index-reduce", breaks=False),
    Case("sampler-operators", breaks=False),
    Case("non-finite", breaks=False),
    Case("int64", breaks=False),
    Case("uploads", breaks=False),
    Case("events", breaks=False),
    Case("host-copies", breaks=False),
    Case("default-copies", breaks=False),
    Case("large-copies", breaks=False),
    Case("out-of-memory", breaks=False),
    Case("memory-stats", breaks=False),
    Case("graph-memory", breaks=False),
    Case("recipe-cache", breaks=False),
    Case("torch-compile", words=("--no-regional-compilation",)),
    Case("compiled-cache-writes", words=("--no-regional-compilation",)),
    Case("compiled-norms", "qwen3_next", ("--no-enable-prefix-caching",)),
)
QUANTIZED = (
    ("fp8-casts", "fp8", "llama"),
    ("fp8-casts", "fp8, blocks", "llama"),
    ("fp8-products", "float-quantized, static", "llama"),
    ("fp8-experts", "fp8", "qwen3_moe"),
    ("fp8-experts", "fp8, static", "qwen3_moe"),
    ("fp8-experts", "fp8, blocks", "qwen3_moe"),
    ("uint4", "gptq", "llama"),
    ("uint4", "awq", "qwen3_moe"),
    ("uint4-groups", "gptq, desc_act", "llama"),
)
"""(fault, format of the checkpoint, family)."""
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 128}


def tokens(folder: Path, loaded: Loaded, dtype: str = "float32") -> list[list[int]]:
    engine = loaded.engine
    caches_prefixes = engine.cache.enable_prefix_caching
    with working(
        folder,
        device=engine.device,
        dtype=dtype,
        execution=engine.execution,
        emulator=engine.emulator,
        prefix_caching=caches_prefixes,
        # Without prefix caching, the largest decode bucket contains all blocks.
        **({} if caches_prefixes else SLICE),
    ) as rig:
        return greedy(rig)


def selected(loaded: Loaded, fault: str, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """`loaded` with the settings that a self-test with a failed check `fault` selects."""
    identity = identity_of(loaded.engine, Machine(environment={}))
    found = SelfTest(identity, False, (result_of(all_checks()[fault], FAILS, ""),))
    choices = choices_for(loaded, loaded, found)
    assert {choice.problem for choice in choices} == {""}
    for choice in choices:
        if choice.setting.isupper():
            monkeypatch.setenv(choice.setting, choice.value)
        else:
            loaded = load([*loaded.words, shown(choice.setting, choice.value)], environ={})
    return loaded


def without_fault(loaded: Loaded) -> Loaded:
    """The same settings for a card without a fault."""
    words = list(loaded.words)
    start = words.index("--emulator-faults")
    return load(words[:start] + words[start + 2 :], environ={})


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.fault, marks=[pytest.mark.slow] if case.is_slow else [])
        for case in CASES
    ],
)
def test_a_server_with_the_fallback_of_a_failed_check_gives_correct_tokens(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = 2 if case.family == "qwen3_next" else 1
    folder = make_tiny(case.family, tmp_path, num_hidden_layers=layers, **dict(case.fields))
    words = ["m", "--device", "hpu-emulator", "--emulator-late-copy", "0", *case.words]
    loaded = load([*words, "--emulator-faults", case.fault], environ={})
    if all_checks()[case.fault].mode == "compile":
        # The mode of a machine with a stock build of torch.
        monkeypatch.setattr("config.loading.env.choose_mode", compiling)
    avoided = selected(loaded, case.fault, monkeypatch)
    if case.dtype == "float32":
        with working(folder) as on_cpu:
            expected = greedy(on_cpu)
    else:
        expected = tokens(folder, without_fault(avoided), case.dtype)

    found = tokens(folder, avoided, case.dtype)

    assert found == expected
    if not case.breaks:
        return
    monkeypatch.undo()
    if all_checks()[case.fault].mode == "compile":
        monkeypatch.setattr("config.loading.env.choose_mode", compiling)
    try:
        without = tokens(folder, loaded, case.dtype)
    except (ConfigError, RuntimeError):
        return
    if case.dtype != "float32":
        expected = tokens(folder, without_fault(loaded), case.dtype)
    assert without != expected


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("fault", "form", "family"), QUANTIZED)
def test_quantized_models_with_the_fallback_of_a_failed_check_give_correct_tokens(
    fault: str, form: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"num_hidden_layers": 1, **(EXPERTS if family == "qwen3_moe" else {})}
    folder = make_quantized(FORMATS[form], tmp_path, family, **fields).folder
    right = load(["m", "--device", "hpu-emulator", "--emulator-late-copy", "0"], environ={})
    wrong = load([*right.words, "--emulator-faults", fault], environ={})
    avoided = selected(wrong, fault, monkeypatch)
    expected = tokens(folder, without_fault(avoided), "bfloat16")

    found = tokens(folder, avoided, "bfloat16")

    assert avoided.engine.emulator.faults == (fault,)
    assert found == expected
    assert tokens(folder, wrong, "bfloat16") != tokens(folder, right, "bfloat16")


def compiling(requested: str, **facts: Any) -> Any:
    """choose_mode on a machine where auto selects torch-compile."""
    from config.execution import ModeChoice, choose_mode

    if requested == "auto":
        return ModeChoice("torch-compile", "a test says so")
    return choose_mode(requested, **facts)
