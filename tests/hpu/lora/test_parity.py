"""Adapters compared with the same adapters merged into the weights, in float32."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ATTENTION, LINEAR, MLP, merge, write_adapter
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import nn

from gaudiserve import LLM, LoRARequest, SamplingParams

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 64,
    "max_model_len": 128,
    "device": "cpu",
}
CARD: dict[str, Any] = {
    **SETTINGS,
    "device": "hpu-emulator",
    "block_size": 16,
    "max_model_len": 64,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 64,
    "max_prefill_batch": 2,
    "num_gpu_blocks_override": 24,
    "bucketing_strategy": "exponential",
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ["Hello", "The sky is blue, and the", "abc"]
Tokens = list[list[int]]


def answers(llm: LLM, prompts: list[str], **options: Any) -> Tokens:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in outputs]


def mixed(llm: LLM, names: list[str | None]) -> dict[str | None, Tokens]:
    """Answers to PROMPTS with each adapter, all in one batch."""
    requests = [None if name is None else LoRARequest(name, 1) for name in names]
    found = answers(
        llm, PROMPTS * len(names), lora_request=[request for request in requests for _ in PROMPTS]
    )
    count = len(PROMPTS)
    return {name: found[i * count : (i + 1) * count] for i, name in enumerate(names)}


def check(
    tmp_path: Path,
    base: Path,
    adapters: dict[str, Path],
    settings: dict[str, Any] = SETTINGS,
    **more: Any,
) -> None:
    """Assert that each adapter's answers in a mixed batch equal the merged weights' answers on a
    CPU."""
    expected: dict[str | None, Tokens] = {}
    with LLM(str(base), **SETTINGS) as llm:
        expected[None] = answers(llm, PROMPTS)
    for name, adapter in adapters.items():
        merged = merge(tmp_path / f"merged-{name}", base, adapter)
        with LLM(str(merged), **SETTINGS) as llm:
            expected[name] = answers(llm, PROMPTS)
        assert expected[name] != expected[None]

    with LLM(
        str(base),
        **{
            **settings,
            "enable_lora": True,
            "max_loras": len(adapters),
            "lora_modules": [f"{name}={path}" for name, path in adapters.items()],
            **more,
        },
    ) as llm:
        found = mixed(llm, [*adapters, None])

    assert found == expected


def test_several_adapters_in_one_batch_equal_merged_weights(tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path / "base")
    adapter = write_adapter(tmp_path / "one", base, seed=1)
    two = write_adapter(
        tmp_path / "two",
        base,
        targets=ATTENTION,
        rank=3,
        seed=2,
        use_rslora=True,
        rank_pattern={"v_proj": 9, "layers.1.self_attn.o_proj": 5},
        alpha_pattern={"q_proj": 16},
    )

    check(tmp_path, base, {"one": adapter, "two": two})


def test_embedding_and_head_have_adapters(tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path / "base")
    adapter = write_adapter(tmp_path / "one", base, targets=("embed_tokens", "lm_head"), seed=1)
    two = write_adapter(tmp_path / "two", base, targets=(*MLP, "lm_head"), seed=2)

    check(tmp_path, base, {"one": adapter, "two": two})


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "phi3"])
def test_adapters_of_families_with_other_layers_equal_merged_weights(
    family: str, tmp_path: Path
) -> None:
    base = make_tiny(family, tmp_path / "base")
    targets = LINEAR if family != "phi3" else ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    adapter = write_adapter(tmp_path / "one", base, targets=targets, seed=1)

    check(tmp_path, base, {"one": adapter})


STATES = {
    "granitemoehybrid": ("mamba.in_proj", "mamba.out_proj", *ATTENTION),
    "lfm2": ("conv.in_proj", "conv.out_proj", "q_proj", "self_attn.out_proj", "w1", "w2"),
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "linear_attn.out_proj", *ATTENTION),
}


@pytest.mark.parametrize("family", STATES)
def test_recurrent_layers_have_adapters(family: str, tmp_path: Path) -> None:
    base = make_tiny(family, tmp_path / "base")
    adapter = write_adapter(tmp_path / "one", base, targets=STATES[family], seed=1)
    two = write_adapter(tmp_path / "two", base, targets=STATES[family][1:2], seed=2)

    check(tmp_path, base, {"one": adapter, "two": two})


@pytest.mark.slow
@pytest.mark.parametrize("family", STATES)
def test_recurrent_layers_have_adapters_on_the_emulated_card(family: str, tmp_path: Path) -> None:
    base = make_tiny(family, tmp_path / "base")
    adapter = write_adapter(tmp_path / "one", base, targets=STATES[family], seed=1)

    check(tmp_path, base, {"one": adapter}, CARD, emulator_strict=True)


def test_experts_have_adapters(tmp_path: Path) -> None:
    base = make_tiny("qwen3_moe", tmp_path / "base")
    adapter = write_adapter(tmp_path / "one", base, seed=1)
    two = write_adapter(tmp_path / "two", base, targets=ATTENTION, seed=2)

    check(tmp_path, base, {"one": adapter, "two": two})


def test_tensor_parallel_ranks_divide_adapters(tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path / "base")
    adapter = write_adapter(tmp_path / "one", base, targets=(*LINEAR, "lm_head", "embed_tokens"))

    check(tmp_path, base, {"one": adapter}, tensor_parallel_size=2, compare_ranks=True)


@pytest.mark.slow
def test_tensor_parallel_ranks_divide_adapters_of_experts(tmp_path: Path) -> None:
    base = make_tiny("qwen3_moe", tmp_path / "base")
    adapter = write_adapter(tmp_path / "one", base, seed=1)
    two = write_adapter(tmp_path / "two", base, targets=ATTENTION, seed=2)

    check(tmp_path, base, {"one": adapter, "two": two}, tensor_parallel_size=2, compare_ranks=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hpu-graphs", "torch-compile"])
def test_adapters_on_the_emulated_card_equal_merged_weights(mode: str, tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path / "base")
    adapter = write_adapter(tmp_path / "one", base, seed=1)
    two = write_adapter(tmp_path / "two", base, targets=(*ATTENTION, "lm_head", "embed_tokens"))

    check(
        tmp_path,
        base,
        {"one": adapter, "two": two},
        CARD,
        execution_mode=mode,
        emulator_strict=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("fully", [False, True])
def test_adapters_on_two_emulated_cards_equal_merged_weights(fully: bool, tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path / "base")
    adapter = write_adapter(tmp_path / "one", base, rank=5, seed=1)

    check(
        tmp_path,
        base,
        {"one": adapter},
        CARD,
        tensor_parallel_size=2,
        fully_sharded_loras=fully,
        max_lora_rank=5,
        emulator_strict=True,
    )


def test_the_prefix_cache_is_keyed_by_the_adapter(tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path / "base")
    own_adapter = write_adapter(tmp_path / "one", base, seed=1)
    prompt = "a long prompt that fills some blocks of the cache " * 2
    with LLM(
        str(base), **SETTINGS, block_size=16, enable_lora=True, lora_modules=[f"one={own_adapter}"]
    ) as llm:
        adapter = LoRARequest("one", 1)
        first = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
        other = llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=adapter)[0]
        again = llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=adapter)[0]

    assert first.num_cached_tokens == other.num_cached_tokens == 0
    assert again.num_cached_tokens > 0
    assert again.outputs[0].token_ids == other.outputs[0].token_ids
    assert first.outputs[0].token_ids != other.outputs[0].token_ids


PEFT_WARNS = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)


def check_peft(tmp_path: Path, family: str, config: dict[str, Any], **settings: Any) -> None:
    """Check that an adapter written by PEFT gives the same answers as the weights that PEFT
    merges."""
    peft: Any = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = make_tiny(family, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)  # type: ignore[no-untyped-call]  # theirs
    torch.manual_seed(1)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **config)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "merged" / name).write_bytes((base / name).read_bytes())
    with LLM(str(tmp_path / "merged"), **SETTINGS) as llm:
        expected = answers(llm, PROMPTS)

    with LLM(
        str(base),
        **{**SETTINGS, **settings},
        enable_lora=True,
        lora_modules=[f"one={tmp_path / 'adapter'}"],
    ) as llm:
        found = mixed(llm, ["one", None])

    assert found["one"] == expected != found[None]


@PEFT_WARNS
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"target_modules": "all-linear", "use_rslora": True}),
        ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
        ("llama", {"target_modules": [*LINEAR, "lm_head"], "exclude_modules": ["lm_head"]}),
        ("llama", {"target_modules": "all-linear", "exclude_modules": r".*layers\.0\..*"}),
        ("llama", {"target_modules": ["q_proj", "v_proj", "qkv_proj", "c_attn"]}),
        ("llama", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]}),
        ("qwen3", {"target_modules": r".*\.(q|k|down)_proj", "rank_pattern": {"k_proj": 3}}),
        ("qwen3_moe", {"target_modules": ["q_proj", "v_proj"], "alpha_pattern": {"v_proj": 2}}),
    ],
)
def test_adapters_written_by_peft_equal_its_merged_weights(
    family: str, config: dict[str, Any], tmp_path: Path
) -> None:
    check_peft(tmp_path, family, config)


@pytest.mark.slow
@PEFT_WARNS
@pytest.mark.parametrize("ranks", [1, 2])
def test_separate_expert_adapters_of_peft_equal_its_merged_weights(
    ranks: int, tmp_path: Path
) -> None:
    peft: Any = pytest.importorskip("peft")
    base = make_tiny("qwen3_moe", tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    # Transformers stacks experts, and PEFT adapts linear layers, so these layers get the
    # checkpoint's names.
    layers = nn.Module()
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            *path, last = name.removesuffix(".weight").split(".")
            parent = layers
            for part in path:
                if part not in dict(parent.named_children()):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = nn.Parameter(weight)
            parent.add_module(last, linear)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(
        layers, peft.LoraConfig(r=4, init_lora_weights=False, target_modules=[*LINEAR])
    )
    adapted.save_pretrained(tmp_path / "adapter")
    merged = shutil.copytree(base, tmp_path / "merged")
    weights |= adapted.merge_and_unload().state_dict()
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(merged), **SETTINGS) as llm:
        expected = answers(llm, PROMPTS)

    flags: dict[str, Any] = {"tensor_parallel_size": 2, "compare_ranks": True} if ranks > 1 else {}
    modules = [f"one={tmp_path / 'adapter'}"]
    with LLM(str(base), enable_lora=True, lora_modules=modules, **SETTINGS, **flags) as llm:
        found = mixed(llm, ["one", None])

    assert any(
        ".experts." in name
        for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    )
    assert found["one"] == expected != found[None]


STACKS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "target_modules": ["q_proj", "gate"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"experts.down_proj": 2},
    },
    "qwen3_moe": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    "qwen2_moe": {"target_modules": "all-linear", "alpha_pattern": {"gate.weight": 2}},
    "gpt_oss": {
        "target_modules": [],
        "target_parameters": ["0.mlp.experts.gate_up_proj", "experts.down_proj", "router.weight"],
    },
    "granitemoe": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]},
}


@PEFT_WARNS
@pytest.mark.parametrize("family", STACKS)
def test_stacked_expert_adapters_of_peft_equal_its_merged_weights(
    family: str, tmp_path: Path
) -> None:
    check_peft(tmp_path, family, STACKS[family])


@pytest.mark.slow
@PEFT_WARNS
@pytest.mark.parametrize("family", ["qwen2_moe"])
def test_adapters_of_stacked_experts_on_the_emulated_card_equal_merged_weights(
    family: str, tmp_path: Path
) -> None:
    check_peft(tmp_path, family, STACKS[family], **CARD, emulator_strict=True)


@pytest.mark.slow
@PEFT_WARNS
@pytest.mark.parametrize("family", STACKS)
def test_tensor_parallel_ranks_divide_stacks_of_experts(family: str, tmp_path: Path) -> None:
    check_peft(tmp_path, family, STACKS[family], tensor_parallel_size=2, compare_ranks=True)
