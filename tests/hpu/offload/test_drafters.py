"""A drafter's part of a KV block is offloaded and loaded together with the block."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from draft_heads import add_mtp_layer, make_eagle, make_eagle3
from drafting import Recorder
from offload_rig import BLOCK_SIZE, IN_MEMORY, TALKS, converse, engine, tokens_of
from tiny_models import make_tiny
from watched_executor import WATCHED

from config.buckets import BucketConfig
from config.execution import EmulatorSettings
from config.params.offload import OffloadConfig
from config.params.speculation import SpeculationConfig
from hpu.spec_decode.drafter import select_proposer
from hpu.worker import drafting

METHODS = ("draft_model", "eagle", "eagle3", "mtp")
ROOMY = 200


def speculating(method: str, parent: Path) -> tuple[Path, SpeculationConfig]:
    """(folder of a target, settings of its drafter). A draft model is the target itself."""
    family = "deepseek_v3" if method == "mtp" else "llama"
    target = make_tiny(
        family, parent / "target", **({} if method == "mtp" else {"num_hidden_layers": 3})
    )
    folder = parent / "drafter"
    folder.mkdir()
    keys: dict[str, Any] = {"model": str(folder)}
    if method == "draft_model":
        keys = {"model": str(target)}
    elif method == "eagle":
        make_eagle(target, folder)
    elif method == "eagle3":
        make_eagle3(target, folder, [0, 1, 2])
    else:
        add_mtp_layer(target)
        keys = {}
    keys |= {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    return target, SpeculationConfig(speculative_config=json.dumps(keys))


@pytest.mark.parametrize("method", METHODS)
def test_drafts_after_loaded_blocks_equal_a_large_cache(method: str, tmp_path: Path) -> None:
    target, speculation = speculating(method, tmp_path)
    kept: dict[str, list[tuple[list[int], list[int]]]] = {"large": [], "small": []}

    def recorded(size: str) -> Any:
        return patch.object(
            drafting,
            "select_proposer",
            lambda *given: Recorder(select_proposer(*given), kept[size]),
        )

    with engine(target, OffloadConfig()) as core:
        plain = converse(core)
    with (
        recorded("large"),
        engine(target, OffloadConfig(), num_blocks=ROOMY, speculation=speculation) as core,
    ):
        large = converse(core)
    with recorded("small"), engine(target, IN_MEMORY, speculation=speculation) as core:
        small = converse(core)
        stats = core.stats()

    assert tokens_of(small) == tokens_of(large) == tokens_of(plain)
    assert all(cached >= 6 * BLOCK_SIZE for _, cached in small[len(TALKS) :])
    assert stats.kv_offload["loaded"] >= 50
    assert kept["small"] == kept["large"] and len(kept["small"]) > 10
    if method == "draft_model":
        counts = stats.spec_decode
        assert counts["num_accepted_tokens"] == counts["num_draft_tokens"] > 10


def test_blocks_of_a_drafter_with_random_weights_are_written_to_files(tmp_path: Path) -> None:
    target, speculation = speculating("eagle", tmp_path)
    for weights in tmp_path.rglob("*.safetensors"):
        weights.unlink()
    offload = OffloadConfig(kv_offloading_size=0.01, kv_offloading_dir=str(tmp_path / "kv"))

    with engine(target, offload, speculation=speculation, load_format="dummy") as core:
        converse(core, rounds=1)

    assert list((tmp_path / "kv").glob("kv-*/*/*/*.kv"))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_drafters_on_a_card_continue_after_loaded_blocks(method: str, tmp_path: Path) -> None:
    target, speculation = speculating(method, tmp_path)
    settings: dict[str, Any] = {
        "device": "hpu-emulator",
        "buckets": BucketConfig(strategy="exponential"),
        "emulator": EmulatorSettings(is_strict=True, memory_bytes=4 << 30),
    }
    with engine(target, OffloadConfig(), **settings) as core:
        plain = converse(core)
    with engine(
        target, OffloadConfig(), num_blocks=ROOMY, speculation=speculation, **settings
    ) as core:
        large = converse(core)
        expected = core.stats().spec_decode

    with engine(target, IN_MEMORY, speculation=speculation, **settings) as core:
        card = torch.hpu.emulated  # type: ignore[attr-defined]  # the emulator's
        before = {name: card.counters.counts[name] for name in WATCHED}
        small = converse(core)
        after = {name: card.counters.counts[name] for name in WATCHED}
        stats = core.stats()

    assert tokens_of(small) == tokens_of(large) == tokens_of(plain)
    assert all(cached >= 6 * BLOCK_SIZE for _, cached in small[len(TALKS) :])
    assert stats.kv_offload["loaded"] >= 50
    assert stats.spec_decode == expected and expected["num_draft_tokens"] > 10
    assert after == before
