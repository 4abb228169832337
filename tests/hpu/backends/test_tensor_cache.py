"""Models that keep the tensor cache of HPU graphs."""

from pathlib import Path

import pytest
from tiny_models import make_tiny
from tiny_vision import make_tiny_vision

from config.model.read_config import read_model_config
from hpu.backends.gaudi import keeps_tensor_cache


@pytest.mark.parametrize("family", ["llava"])
def test_models_with_a_llava_tower_keep_the_tensor_cache(family: str, tmp_path: Path) -> None:
    folder = make_tiny_vision(family, tmp_path / family)

    assert keeps_tensor_cache(read_model_config(str(folder)))


@pytest.mark.parametrize(("family", "keeps"), [("llama", False), ("qwen2", True)])
def test_text_models_keep_the_tensor_cache_by_architecture(
    family: str, keeps: bool, tmp_path: Path
) -> None:
    assert keeps_tensor_cache(read_model_config(str(make_tiny(family, tmp_path)))) == keeps
