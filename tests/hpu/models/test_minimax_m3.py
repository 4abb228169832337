"""MiniMax-M3: block-sparse attention compared with transformers, with plain operations and with the
kernels of a Gaudi."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import emulated
from greedy import (
    assert_same_as_transformers,
    greedy_by_pages,
    load_reference,
    random_prompts,
    tokens_of,
)
from paged_harness import load_decoder
from tiny_models import FAMILIES, make_tiny

from config.engine import CacheConfig, EngineConfig
from config.errors import ConfigError
from config.model.architectures import decoder_spec
from config.model.read_config import read_model_config
from config.startup_checks import check_checkpoint
from hpu.model_loader.size_estimate import context_bytes, kv_block_bytes
from hpu.models.decoder import Decoder
from hpu.quantization.kv_cache import Int8Format

FAMILY = "minimax_m3_vl_text"
if FAMILY not in FAMILIES:
    pytest.skip("an older transformers lacks it", allow_module_level=True)

NEW_TOKENS, TOLERANCE = 8, 1e-3
PROMPTS = random_prompts(1, 40, 23)
"""Prompts of up to ten blocks of 4 tokens; a query attends to 3 blocks. Chunks of a prompt begin
within blocks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(FAMILY, tmp_path_factory.mktemp("m3"))


def assert_transformers_agrees(model: Decoder, folder: Path) -> None:
    with torch.inference_mode():
        found = greedy_by_pages(model, PROMPTS, NEW_TOKENS)

        assert_same_as_transformers(found, PROMPTS, load_reference(folder), TOLERANCE)


def test_block_sparse_attention_equals_transformers(folder: Path) -> None:
    assert_transformers_agrees(load_decoder(folder), folder)


@pytest.mark.parametrize("fused_sdpa", [True, False])
def test_gaudi_kernels_attend_to_the_chosen_blocks(folder: Path, fused_sdpa: bool) -> None:
    with emulated(lazy=False, generation="gaudi3", runs_on_host=True):
        from hpu.ops.gaudi import GaudiKernels

        model = load_decoder(folder)
        model.use_kernels(GaudiKernels(fused_sdpa=fused_sdpa))

        assert_transformers_agrees(model, folder)


@torch.inference_mode()
def test_dense_attention_gives_other_tokens(folder: Path, tmp_path: Path) -> None:
    """Shows that the tests above detect a wrong choice of blocks."""
    sparse = greedy_by_pages(load_decoder(folder), PROMPTS, NEW_TOKENS)
    dense = make_tiny(FAMILY, tmp_path, index_topk_blocks=100)

    found = greedy_by_pages(load_decoder(dense), PROMPTS, NEW_TOKENS)

    assert tokens_of(found)[0] == tokens_of(sparse)[0]
    assert tokens_of(found)[1] != tokens_of(sparse)[1]


@torch.inference_mode()
def test_more_local_blocks_and_a_single_kv_head_agree_with_transformers(tmp_path: Path) -> None:
    fields = {"num_key_value_heads": 1, "index_n_heads": 1, "index_local_blocks": 2}
    folder = make_tiny(FAMILY, tmp_path, **fields)

    assert_transformers_agrees(load_decoder(folder), folder)


def test_index_keys_are_counted_beside_keys_and_values(folder: Path) -> None:
    model = load_decoder(folder)

    shapes = model.cache_shapes(1, 4)

    assert shapes == [((4, 2, 16),) * 2, *[((4, 2, 16), (4, 2, 16), (4, 1, 16))] * 2]
    numbers = sum(a * b * c for layer in shapes for a, b, c in layer)
    size = kv_block_bytes(read_model_config(str(folder)), num_cards=1, width=2, block_size=4)
    assert size == 2 * numbers


def test_the_plan_has_a_mask_of_the_chosen_blocks(folder: Path, tmp_path: Path) -> None:
    dense = read_model_config(change(folder, tmp_path, layer_types=["full_attention"] * 3))
    sizes: dict[str, Any] = {"width": 2, "num_tokens": 64, "max_model_len": 512, "block_size": 4}

    found = [
        context_bytes(config, num_cards=2, slices=(128, 32), **sizes)
        for config in (dense, read_model_config(str(folder)))
    ]

    # One KV head per card: two copies of the scores and a mask in float32, and a mask in 16 bits.
    assert found[1] >= 64 * 512 * (3 * 4 + 2) > found[0]


@torch.inference_mode()
def test_index_keys_have_the_format_of_the_cache(folder: Path) -> None:
    plain = greedy_by_pages(load_decoder(folder), PROMPTS, 1)
    model = load_decoder(folder, format=Int8Format())

    assert model.cache_shapes(1, 4)[1][2] == (4, 1, 20)
    found = greedy_by_pages(model, PROMPTS, 1, cache_dtype=torch.int8)

    for (_, logits), (_, expected) in zip(found, plain, strict=True):
        assert (logits - expected).abs().median() < 0.1


PUBLISHED = {
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 16,
        "sparse_num_index_heads": 2,
        "sparse_topk_blocks": 3,
        "sparse_block_size": 4,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_score_type": "max",
        "sparse_attention_freq": [0, 1, 1],
    },
    "moe_layer_freq": [0, 1, 1],
    "hidden_act": "swigluoai",
    "qk_norm_type": "per_head",
    "use_gemma_norm": True,
    "n_shared_experts": 1,
    "rope_theta": 10000.0,
}


def change(folder: Path, target: Path, **fields: Any) -> str:
    """A copy of the config.json with other `fields`; None removes a field."""
    config = {**json.loads((folder / "config.json").read_text()), **fields}
    kept = {name: value for name, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(kept))
    return str(target)


def test_published_fields_equal_transformers(folder: Path, tmp_path: Path) -> None:
    names = [name for name in FAMILIES[FAMILY] if name.startswith("index_")]
    absent = dict.fromkeys([*names, "layer_types", "mlp_layer_types", "rope_parameters"])

    found = decoder_spec(read_model_config(change(folder, tmp_path, **absent, **PUBLISHED)))

    assert found == decoder_spec(read_model_config(str(folder)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index_n_heads": 4}, "has 4 index heads and 2 KV heads: the numbers must be equal"),
        ({"index_head_dim": 4}, "index heads of 4 dimensions, rope needs at least 8"),
        ({"layer_types": ["full_attention"]}, "has 1 entries, it must have 3"),
        (
            {"sparse_attention_config": {"sparse_disable_index_value": [1, 0, 1]}},
            "index values are not supported",
        ),
        ({"qk_norm_type": "all"}, r"qk_norm_type in .* is 'all', it must be per_head"),
        ({"attention_output_gate": True}, r"attention_output_gate in .* it must be False"),
        (
            {"sparse_attention_config": {"sparse_score_type": "mean"}},
            r"sparse_score_type in .* is 'mean', it must be max",
        ),
    ],
)
def test_unsupported_attention_fields_are_refused(
    fields: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder_spec(read_model_config(change(folder, tmp_path, **fields)))


def test_cache_blocks_have_the_size_of_the_indexer(folder: Path) -> None:
    check_checkpoint(EngineConfig(str(folder)), str(folder))
    config = EngineConfig(str(folder), cache=CacheConfig(block_size=16))

    with pytest.raises(ConfigError, match=r"--block-size is 16, and the indexer .* of 4 keys"):
        check_checkpoint(config, str(folder))
