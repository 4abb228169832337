"""Memory of adapter slots, estimated from config.json, equals the slots' real memory on a card."""

from pathlib import Path
from typing import Any

import pytest
from random_checkpoint import write_mxfp4
from tiny_models import make_tiny

from config.checkpoint.weight_maps.shard import ShardRank
from config.engine import EngineConfig
from config.model.read_config import read_model_config
from config.parallel import WHOLE, Stage
from config.params.lora import EXTRA_TARGETS, LoRAConfig
from hpu.backends.select import select_backend
from hpu.lora.slot_sizes import adapter_slot_bytes
from hpu.worker.load import load

FAMILIES = ("llama", "gemma2", "deepseek_v3", "mixtral", "gpt_oss", "qwen3_next", "qwen2_moe")


@pytest.mark.parametrize("targets", [("none",), EXTRA_TARGETS], ids=["linear", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_slots_take_the_estimated_memory(
    tmp_path: Path, family: str, targets: tuple[str, ...]
) -> None:
    check_slots(make_tiny(family, tmp_path), targets)


def test_slots_of_experts_in_mxfp4_take_the_estimated_memory(tmp_path: Path) -> None:
    check_slots(write_mxfp4(tmp_path / "base"), EXTRA_TARGETS)


def check_slots(base: Path, targets: tuple[str, ...]) -> None:
    """Check that the estimate of the slots equals their memory on the emulated card."""
    facts = read_model_config(str(base))
    lora = LoRAConfig(enable_lora=True, max_loras=3, max_lora_rank=8, lora_extra_targets=targets)
    config = EngineConfig(model=str(base), device="hpu-emulator", dtype="bfloat16", lora=lora)
    backend = select_backend(config)
    try:
        manager = load(config, facts, None, backend, lambda progress: None).lora
        assert manager is not None

        estimated = adapter_slot_bytes(config, facts, at=ShardRank(), width=2, stage=WHOLE)

        assert estimated == manager.num_bytes
        manager.close()
    finally:
        backend.close()


def test_fully_sharded_loras_halve_the_slots_of_each_of_two_cards(tmp_path: Path) -> None:
    base = make_tiny("llama", tmp_path)
    facts = read_model_config(str(base))

    def estimated(at: ShardRank, stage: Stage = WHOLE, **settings: Any) -> int:
        lora = LoRAConfig(enable_lora=True, max_lora_rank=8, **settings)
        config = EngineConfig(model=str(base), lora=lora)
        return adapter_slot_bytes(config, facts, at=at, width=2, stage=stage)

    whole, halves = estimated(ShardRank()), estimated(ShardRank(size=2))
    sharded = estimated(ShardRank(size=2), fully_sharded_loras=True)
    stages = [estimated(ShardRank(), Stage(rank, 2)) for rank in range(2)]

    assert whole / 2 < halves < whole
    assert sharded == whole // 2
    assert sum(stages) == whole
