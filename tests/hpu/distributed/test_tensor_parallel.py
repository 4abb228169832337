"""A model sharded over gloo ranks gives the logits and greedy tokens of the whole model."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from rank_pool import (
    Generated,
    RankPool,
    decode_cached,
    encode,
    generate,
    load_with_small_pieces,
    prefill_quantized,
)
from releases import transformers_before
from safetensors.torch import load_file, save_file
from tiny_encoders import make_pooling
from tiny_models import make_tiny

from config.errors import ConfigError
from config.model.read_config import read_model_config
from hpu.distributed.process_groups import SINGLE, ProcessGroup
from hpu.model_loader.size_estimate import count_parameters, kv_block_bytes, state_bytes
from hpu.models.base import ModelBuild
from hpu.models.registry import build_model, build_transformers_model

META = torch.device("meta")
MIB = 2**20


class Case(NamedTuple):
    """A tiny model with 4 heads and 2 KV heads, and its number of ranks."""

    family: str
    overrides: Mapping[str, Any] = MappingProxyType({})
    size: int = 2
    """Number of ranks in the default run; the slow run also uses the other of 2 and 4."""
    distributes_experts: bool = False


CASES = {
    "llama": Case("llama", {"attention_bias": True, "mlp_bias": True}, 4),
    "llama, tokens that do not divide": Case("llama", {"vocab_size": 321}, 4),
    "qwen3": Case("qwen3", {"tie_word_embeddings": True, "vocab_size": 323}),
    "granite": Case("granite"),
    # Fused qkv tensors, and fused gate and up.
    "phi3": Case("phi3"),
    # Fewer KV heads than ranks.
    "phi3, one KV head": Case("phi3", {"num_key_value_heads": 1}, 4),
    "qwen3, one KV head": Case("qwen3", {"num_key_value_heads": 1}, 4),
    # Query and key norms over the heads of all ranks.
    "olmoe": Case("olmoe", {}, 4),
    "olmoe, one KV head": Case("olmoe", {"num_key_value_heads": 1}),
    "minimax_m2": Case("minimax_m2"),
    # One KV head and learned position embeddings.
    "gpt_bigcode": Case("gpt_bigcode", {"n_inner": 128}),
    # Queries, keys and values interleaved by head, and another name of the LM head.
    "gpt_neox": Case("gpt_neox", {}, 4),
    # An LM head with a bias.
    "phi": Case("phi", {"vocab_size": 321}),
    # A separate norm tensor per head.
    "stablelm": Case("stablelm", {"qk_layernorm": True}, 4),
    # Float32 norms per head, and separate RoPE parameters for each layer type.
    "gemma3": Case(
        "gemma3_text", {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    # Logits with a soft cap.
    "gemma2": Case("gemma2", {"head_dim": 16, "final_logit_softcapping": 2.0}, 4),
    # ALiBi and a fused qkv tensor.
    "mpt": Case("mpt", {}, 4),
    # (in, out) matrices and a fused qkv tensor.
    "gpt2": Case("gpt2", {"n_inner": 128}),
    "mixtral": Case("mixtral", {}, 4),
    "qwen2_moe": Case("qwen2_moe", {"mlp_only_layers": [0]}),
    "glm4_moe": Case("glm4_moe", {}, 4),
    "granitemoeshared": Case("granitemoeshared"),
    "ernie4_5_moe": Case("ernie4_5_moe"),
    "phimoe": Case("phimoe"),
    # Sinks, windows, and experts with biases.
    "gpt_oss": Case("gpt_oss", {}, 4),
    # Chunked attention, experts with weighted inputs, (in, out) matrices.
    "llama4": Case("llama4_text"),
    # MLA latents are replicated on every rank.
    "deepseek_v2": Case("deepseek_v2", {"attention_bias": True}),
    "deepseek_v3, no latent of queries": Case("deepseek_v3", {"q_lora_rank": None}, 4),
    # Mamba 2: all ranks share a group, or each pair of four ranks, or each rank has its own group.
    "granitemoehybrid": Case("granitemoehybrid", {"mamba_proj_bias": True}, 4),
    "granitemoehybrid, two groups": Case(
        "granitemoehybrid", {"mamba_n_groups": 2, "num_local_experts": 0, "num_experts_per_tok": 0}
    ),
    "granitemoehybrid, two groups on four": Case(
        "granitemoehybrid", {"mamba_n_groups": 2, "mamba_conv_bias": False}, 4
    ),
    # Gated DeltaNet: tensors interleaved by key head, or a tensor for each output.
    "qwen3_next": Case("qwen3_next"),
    "qwen3_next, two key heads on four": Case("qwen3_next", {"num_key_value_heads": 1}, 4),
    "qwen3_5": Case("qwen3_5_text", {}, 4),
    # Short convolutions sharded by channel.
    "lfm2": Case("lfm2", {"conv_bias": True}, 4),
    # Expert parallelism: whole experts on each rank.
    "mixtral, distributed": Case("mixtral", {}, 4, True),
    "mixtral, distributed, five inner features": Case("mixtral", {"intermediate_size": 5}, 2, True),
    "granitemoeshared, distributed": Case("granitemoeshared", {}, 2, True),
    "gpt_oss, distributed": Case("gpt_oss", {}, 2, True),
    "llama4, distributed": Case("llama4_text", {}, 2, True),
    "deepseek_v3, distributed": Case("deepseek_v3", {}, 4, True),
}
NEW = {
    *("qwen3_5_text", "qwen3_next", "granitemoehybrid", "minimax_m2", "llama4_text", "gpt_oss"),
    "lfm2",
}
"""Families that older releases of transformers lack or spell differently."""
FOREIGN: dict[str, dict[str, Any]] = {}
if transformers_before("5.18"):
    CASES = {name: case for name, case in CASES.items() if case.family not in NEW}
else:
    FOREIGN = {
        "gpt_neox": {},
        "starcoder2": {"use_bias": True, "tie_word_embeddings": True},
        "ministral": {"head_dim": 16, "vocab_size": 321},
        "qwen3_moe": {},
    }
"""Cases on two ranks with transformers' own code."""
FOREIGN_CASES = [(name, False) for name in FOREIGN] + [("qwen3_moe", True)] * bool(FOREIGN)


class Tiny:
    """Checkpoints of the cases, and the results of a single process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._expected: dict[Path, Generated] = {}

    def make(self, family: str, overrides: Mapping[str, Any]) -> Path:
        folder = self._folder / f"{family} {sorted(overrides.items())}"
        return folder if folder.exists() else make_tiny(family, folder, **overrides)

    @torch.inference_mode()
    def generate(self, folder: Path) -> Generated:
        if folder not in self._expected:
            self._expected[folder] = generate(SINGLE, str(folder))
        return self._expected[folder]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


def check(name: str, size: int, tiny: Tiny, pool: RankPool) -> None:
    """Assert that each of `size` ranks gives the results of a single process."""
    case = CASES[name]
    folder = tiny.make(case.family, case.overrides)
    expected = tiny.generate(folder)

    found = pool.run(size, generate, str(folder), case.distributes_experts)

    assert expected.logits.std() > 0.1
    for entry in found:
        assert torch.equal(entry.logits, found[0].logits)
        assert entry.tokens == expected.tokens
    torch.testing.assert_close(found[0].logits, expected.logits, rtol=1e-4, atol=1e-4)
    counted = count_parameters(
        read_model_config(str(folder)), size, distributes_experts=case.distributes_experts
    )
    assert found[0].num_parameters == counted


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_give_the_logits_and_tokens_of_a_single_process(
    name: str, tiny: Tiny, pool: RankPool
) -> None:
    check(name, CASES[name].size, tiny, pool)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_another_number_of_ranks_gives_the_same_logits_and_tokens(
    name: str, tiny: Tiny, pool: RankPool
) -> None:
    check(name, 6 - CASES[name].size, tiny, pool)


@pytest.mark.parametrize(("name", "distributes_experts"), FOREIGN_CASES)
def test_ranks_of_the_transformers_fallback_give_the_logits_of_a_single_process(
    name: str, distributes_experts: bool, tiny: Tiny, pool: RankPool
) -> None:
    folder = str(tiny.make(name, FOREIGN[name]))
    with torch.inference_mode():
        expected = generate(SINGLE, folder, by_transformers=True)

    found = pool.run(2, generate, folder, distributes_experts, True)

    assert torch.equal(found[0].logits, found[1].logits)
    torch.testing.assert_close(found[0].logits, expected.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_ranks_with_another_kv_cache_dtype_agree_with_a_single_process(
    kv_cache_dtype: str, tmp_path: Path, pool: RankPool
) -> None:
    folder = make_tiny("llama", tmp_path)
    file = folder / "model.safetensors"
    scale = {"model.layers.0.self_attn.k_scale": torch.tensor(0.25)}
    if kv_cache_dtype == "fp8":
        save_file({**load_file(file), **scale}, file, metadata={"format": "pt"})
    with torch.inference_mode():
        expected = decode_cached(SINGLE, str(folder), kv_cache_dtype)

    found = pool.run(2, decode_cached, str(folder), kv_cache_dtype)

    assert torch.equal(*found)
    # The all-reduce adds in another order, which rounds some cached numbers to a neighboring value.
    error = (found[0] - expected).square().mean().sqrt()
    assert error < 0.02 * expected.std()


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_ranks_quantize_their_shards(bits: str, tiny: Tiny, pool: RankPool) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    folder = str(tiny.make("llama", {**sizes, "attention_bias": True}))
    with torch.inference_mode():
        expected = prefill_quantized(SINGLE, folder, bits)

    found = pool.run(2, prefill_quantized, folder, bits)

    assert torch.equal(*found)
    # 8-bit scales come from a shard of the inputs, 4-bit scales from all inputs.
    error = (found[0] - expected).square().mean().sqrt()
    assert error < 0.06 * expected.std()


@pytest.mark.parametrize("family", ["bert", "nomic_bert", "llama"])
def test_ranks_give_the_hidden_states_of_a_single_process(
    family: str, tmp_path: Path, pool: RankPool
) -> None:
    folder = str(make_pooling(family, tmp_path))
    with torch.inference_mode():
        expected = encode(SINGLE, folder)

    found = pool.run(2, encode, folder)

    assert torch.equal(*found)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_has_the_estimated_parameters_and_caches(name: str, tiny: Tiny) -> None:
    case = CASES[name]
    config, size = read_model_config(str(tiny.make(case.family, case.overrides))), case.size
    group = ProcessGroup(range(size), rank=1)
    experts = group if case.distributes_experts else SINGLE

    shard = build_model(
        config, ModelBuild(dtype=torch.float32, device=META, group=group, expert_group=experts)
    )

    held = sum(parameter.numel() for parameter in shard.parameters())
    is_distributed = case.distributes_experts
    assert held == count_parameters(config, size, distributes_experts=is_distributed)
    caches = [shape for shapes in shard.cache_shapes(1, 16) for shape in shapes]
    is_latent = shard.spec.mla is not None
    kv_heads = 1 if is_latent else max(1, config.num_kv_heads // size)
    assert {heads for _, heads, _ in caches} == {kv_heads}
    held = sum(torch.Size(shape).numel() for shape in caches) * 4
    assert held == kv_block_bytes(config, num_cards=size, width=4, block_size=16)
    states = 8 * sum(spec.num_bytes for spec in shard.state_specs())
    assert states == state_bytes(config, width=4, num_seqs=6, num_cards=size)


def test_ranks_read_each_byte_once_except_replicated_tensors(tiny: Tiny, pool: RankPool) -> None:
    folder = tiny.make("llama", CASES["llama"].overrides)
    tensors = load_file(folder / "model.safetensors")

    found = pool.run(4, generate, str(folder))

    expected = 0
    for name, tensor in tensors.items():
        is_key = "k_proj" in name or "v_proj" in name
        is_whole = "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
        # Two KV heads are on two ranks each.
        expected += tensor.nbytes * (2 if is_key else 4 if is_whole else 1)
    assert sum(entry.num_bytes_read for entry in found) == expected
    assert len({entry.num_bytes_read for entry in found}) == 1


def test_a_rank_needs_little_more_memory_than_its_shard(tmp_path: Path, pool: RankPool) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
    folder = make_tiny("llama", tmp_path, num_key_value_heads=16, **sizes)
    num_bytes = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())

    found = pool.run(4, load_with_small_pieces, str(folder))

    assert num_bytes > 100 * MIB
    for peak, num_read in found:
        assert num_read < num_bytes / 4 + MIB
        assert peak < num_bytes / 4 + 8 * MIB


def test_a_model_that_the_ranks_cannot_divide_is_refused_with_both_numbers(tiny: Tiny) -> None:
    config, group = read_model_config(str(tiny.make("llama", {}))), ProcessGroup(range(3))

    with pytest.raises(ConfigError, match=r"has 4 query heads, and 3 .* works with 1, 2, 4$"):
        build_model(config, ModelBuild(dtype=torch.float32, device=META, group=group))


def test_the_number_of_expert_ranks_must_divide_the_experts(tiny: Tiny) -> None:
    two, four, six = (ProcessGroup(range(size)) for size in (2, 4, 6))
    dense = read_model_config(str(tiny.make("llama", {})))
    mixture = read_model_config(str(tiny.make("mixtral", {})))

    with pytest.raises(ConfigError, match="has no experts"):
        build_model(
            dense, ModelBuild(dtype=torch.float32, device=META, group=two, expert_group=two)
        )
    build_model(mixture, ModelBuild(dtype=torch.float32, device=META, group=two, expert_group=four))
    with pytest.raises(ConfigError, match=r"has 4 experts, and 6 .* does not divide"):
        build_model(
            mixture, ModelBuild(dtype=torch.float32, device=META, group=two, expert_group=six)
        )


@pytest.mark.skipif(transformers_before("5.18"), reason="needs the interfaces of 5.18")
@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("persimmon", {}, "has no plan for several cards"),
        ("olmo2", {}, "divides .*q_proj among cards as colwise_gather_output"),
        (
            "mixtral",
            {"num_local_experts": 4, "intermediate_size": 97},
            r"has 97 inner features in .*experts, and 2 .* does not divide them",
        ),
        (
            "starcoder2",
            {"num_key_value_heads": 1},
            r"4 query heads and 1 KV heads, and 2 \(--tensor-parallel-size\) does not divide",
        ),
        (
            "starcoder2",
            {"intermediate_size": 97},
            r"has 97 outputs in .*mlp.c_fc, and 2 \(--tensor-parallel-size\) does not divide",
        ),
    ],
)
def test_the_transformers_fallback_is_refused_if_cards_cannot_divide_the_model(
    family: str, overrides: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = read_model_config(str(make_tiny(family, tmp_path, **overrides)))

    with pytest.raises(ConfigError, match=reason):
        build_transformers_model(
            config, ModelBuild(dtype=torch.float32, device=META, group=ProcessGroup(range(2)))
        )
