"""MLA on the strict emulated card."""

from pathlib import Path
from typing import Any

import pytest
from paged_harness import load_decoder
from strict_card import STRICT, assert_nothing_compiles_after_warmup
from tiny_models import FAMILIES, make_tiny
from two_prompts import greedy, working

from config.engine import EngineConfig
from config.execution import ExecutionConfig
from hpu.backends.select import select_backend

pytestmark = pytest.mark.skipif(
    "deepseek_v2" not in FAMILIES, reason="the installed transformers does not know it"
)

NO_QUERY_LATENT = {"q_lora_rank": None, "v_head_dim": 28}
"""Values are wider than keys, so that keys are padded."""
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
"""A single MoE layer, because each kind of layer is compiled for each bucket."""

OPERATORS = {
    "matmul_qk": "Matmul",
    "softmax": "Softmax",
    "matmul_av": "Matmul",
    "batch2block_matmul": "B2BMatmul",
    "block2batch_matmul": "B2BMatmul",
    "latent_cache_k": "VLLMKVCache",
    "fused_scaled_dot_product_attention": "ModuleFusedSDPA",
}
PROJECTIONS = {
    "fused_qkv_a_proj": "ReplicatedLinear",
    "q_b_proj": "ColumnParallelLinear",
    "kv_b_proj": "ColumnParallelLinear",
    "o_proj": "RowParallelLinear",
}


@pytest.mark.parametrize(
    ("family", "fields", "execution"),
    [
        ("deepseek_v2", {}, ExecutionConfig(mode="hpu-graphs")),
        pytest.param(
            *("deepseek_v2", ONE_LAYER, ExecutionConfig(mode="torch-compile")),
            marks=pytest.mark.slow,
        ),
        ("deepseek_v3", NO_QUERY_LATENT, ExecutionConfig(mode="hpu-graphs", fused_sdpa=False)),
        pytest.param(
            "deepseek_v3",
            {**NO_QUERY_LATENT, **ONE_LAYER},
            ExecutionConfig(mode="torch-compile", fused_sdpa=False),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["v2", "v2, compiled", "v3, unfused", "v3, unfused, compiled"],
)
def test_the_card_gives_the_tokens_of_the_cpu_and_compiles_nothing_after_warm_up(
    family: str,
    fields: dict[str, Any],
    execution: ExecutionConfig,
    tmp_path: Path,
) -> None:
    folder = make_tiny(family, tmp_path, **fields)

    assert_nothing_compiles_after_warmup(folder, execution)


@pytest.mark.parametrize(
    "mode", ["hpu-graphs", pytest.param("torch-compile", marks=pytest.mark.slow)]
)
def test_latent_attention_in_slices_gives_the_tokens_of_the_cpu(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("deepseek_v2", tmp_path)
    with working(folder) as on_cpu:
        expected = greedy(on_cpu)
    # 64 new and 32 * 8 cached tokens: two slices of the new tokens, six of the cached tokens.
    monkeypatch.setattr(ExecutionConfig, "slice_sizes", (100, 48))

    execution = ExecutionConfig(mode=mode)
    with working(folder, device="hpu-emulator", execution=execution, emulator=STRICT) as rig:
        found = greedy(rig)

    assert found == expected


def test_every_operator_has_the_class_and_path_that_the_compressor_expects(
    tmp_path: Path,
) -> None:
    model = load_decoder(make_tiny("deepseek_v2", tmp_path, num_hidden_layers=1))
    before = {name for name, _ in model.named_parameters()}
    backend = select_backend(EngineConfig("m", device="hpu-emulator"))

    prepared = backend.prepare(model)

    attention = prepared.model.layers[0].self_attn
    found = {path: type(module).__name__ for path, module in attention.named_modules() if path}
    impl = "mla_attn.mla_attn.impl"
    assert found == {
        **PROJECTIONS,
        "q_a_layernorm": "RMSNorm",
        "kv_a_layernorm": "RMSNorm",
        "mla_attn": "ModuleDict",
        "mla_attn.mla_attn": "PagedLatentAttention",
        impl: "GaudiAttention",
        **{f"{impl}.{name}": kind for name, kind in OPERATORS.items()},
    }
    assert {name for name, _ in prepared.named_parameters()} == before
    assert not [name for name in before if ".mla_attn." in name]
    backend.close()
