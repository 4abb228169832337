"""Vision towers in checkpoints that transformers 4.51 and 4.57 saved: CLIP and SigLIP towers have a
module vision_model around their layers, which transformers 5 does not have."""

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_vision_models import make_tiny_vision

from config.checkpoint.weight_maps.text_part import OUTSIDE
from config.model.read_config import read_model_config
from hpu.multimodal.towers.tower import VisionTower

SLOW = pytest.mark.slow
PARTS = r"(vision_tower|vision_model)\.(?=embeddings|encoder|post_layernorm|pre_layrnorm|head)"


def older(name: str) -> str:
    return re.sub(PARTS, r"\1.vision_model.", name)


@pytest.mark.parametrize(
    ("name", "num_renamed"),
    [
        ("llava", 39),
        pytest.param("llava_next", 39, marks=SLOW),
        pytest.param("granite_vision", 48, marks=SLOW),
        pytest.param("gemma3", 48, marks=SLOW),
        pytest.param("aya_vision", 48, marks=SLOW),
        pytest.param("vipllava", 39, marks=SLOW),
        pytest.param("deepseek_vl", 48, marks=SLOW),
        ("lfm2_vl", 48),
    ],
)
def test_a_tower_is_found_under_its_older_names(
    name: str, num_renamed: int, tmp_path: Path
) -> None:
    make_tiny_vision(name, tmp_path)
    config = read_model_config(str(tmp_path))
    weight_map = VisionTower(config, dtype=torch.float32, device=torch.device("meta")).weight_map
    with safe_open(tmp_path / "model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]  # theirs
        names = list(file.keys())

    found = {weight_map.map_name(older(name)) for name in names}

    assert {name for name in found if not name.startswith(OUTSIDE)} == {
        entry.name for entry in weight_map.entries()
    }
    assert sum(older(name) != name for name in names) == num_renamed
