"""A worker with images: memory, older tensor names, sleep, ranks and invalid plans."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from image_traffic import ImageRig, Prompt, run_rank, text, write
from rank_pool import RankPool
from safetensors.torch import load_file, save_file
from tiny_vision_models import IMAGE, Picture, generate, make_tiny_vision, prepare
from worker_rig import WorkerRig

from config.checkpoint.facts import model_facts
from config.errors import ConfigError
from engine.reports.plan import with_sizes

NEW_TOKENS = 4


class Model:
    """A checkpoint, and a prompt with an image."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.whole: Any = make_tiny_vision(name, folder)
        self.picture: Picture = prepare(name, self.whole, [1])[0]
        self.prompt: Prompt = write(text(1, 5), (b"one", self.picture), text(2, 3))

    @property
    def expected(self) -> list[int]:
        return generate(self.name, self.whole, self.prompt.tokens, [self.picture], NEW_TOKENS)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"))


def tokens_of(rig: WorkerRig, model: Model) -> list[int]:
    images = ImageRig(rig)
    images.admit(0, model.prompt)
    rig.prefill({0: None})
    rig.step()
    rig.run([0], NEW_TOKENS - 1)
    images.free_all()
    return rig.free(0)


def test_a_worker_sleeps_and_wakes_with_its_tower(qwen: Model) -> None:
    rig = WorkerRig(qwen.folder)
    try:
        assert rig.ready.encoder_cache_tokens == 512
        tower = rig.worker.loaded.tower  # type: ignore[union-attr]
        assert tower is not None
        count = sum(parameter.numel() for parameter in tower.parameters())
        assert model_facts(str(qwen.folder)).num_tower_parameters == count
        first = tokens_of(rig, qwen)
        rig.step()
        rig.sleep(2)
        rig.worker.wake_up(lambda progress: None)

        assert first == tokens_of(rig, qwen) == qwen.expected
    finally:
        rig.worker.close()


def test_early_qwen_checkpoints_without_text_config_are_served(tmp_path: Path) -> None:
    model = Model("qwen2_vl", tmp_path)
    expected = model.expected
    file = tmp_path / "model.safetensors"
    old = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in load_file(file).items()
    }
    assert any(name.startswith("visual.") for name in old)
    assert any(name.startswith("model.layers.") for name in old)
    save_file(old, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    fields = config.pop("text_config")
    fields.pop("model_type")
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope["rope_theta"]
    fields["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (tmp_path / "config.json").write_text(json.dumps({**fields, **config}))
    rig = WorkerRig(tmp_path)
    try:
        assert tokens_of(rig, model) == expected
    finally:
        rig.worker.close()


def test_a_tower_without_a_tensor_is_refused_with_its_name(tmp_path: Path) -> None:
    make_tiny_vision("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(tensor for tensor in tensors if "multi_modal_projector.linear_1.weight" in tensor)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=r"1 of \d+ are missing: .*linear_1.weight"):
        WorkerRig(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_number_of_embeddings_fails_only_the_requests_of_the_image(
    dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_tiny_vision("llava", tmp_path)
    (picture,) = prepare("llava", whole, [0])
    count = picture.num_embeddings
    wrong = replace(picture, tokens=[*picture.tokens, IMAGE], num_embeddings=count + 1)
    rig = WorkerRig(tmp_path, dtype=dtype)
    images = ImageRig(rig)
    try:
        images.admit(0, write(text(1, 5), (b"wrong", wrong)))
        images.admit(1, write(text(2, 7)))
        rig.prefill({0: None, 1: None})
        found = rig.step().tokens

        assert found[0] == -1 and found[1] >= 0
        assert f"returned {count} embeddings of an image, the plan has {count + 1}" in caplog.text
        # The next request has another image of the same size.
        rig.free(0)
        images.admit(0, write(text(1, 5), (b"right", picture)))
        rig.prefill({0: None})
        rig.decode([1])
        assert min(rig.step().tokens) >= 0
    finally:
        rig.worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "mllama", "qwen3_5"])
def test_each_of_two_ranks_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = Model(name, tmp_path / "model")
    (tmp_path / "pool").mkdir()
    with RankPool(2, tmp_path / "pool", joins=False) as pool:
        found = pool.run(
            2,
            run_rank,
            *(str(model.folder), f"file://{tmp_path}/ranks", model.prompt, NEW_TOKENS),
        )

    assert found == [model.expected, model.expected]


@pytest.mark.parametrize("name", ["qwen2_vl", "phi4_multimodal"])
def test_a_plan_counts_the_tower_that_a_worker_loads_with_and_without_files(
    name: str, tmp_path: Path
) -> None:
    model = Model(name, tmp_path / "model")
    rig = WorkerRig(model.folder)
    try:
        tower = rig.worker.loaded.tower  # type: ignore[union-attr]
        assert tower is not None
        count = sum(parameter.numel() for parameter in tower.parameters())
    finally:
        rig.worker.close()
    (tmp_path / "alone").mkdir()
    shutil.copy(model.folder / "config.json", tmp_path / "alone")

    facts = model_facts(
        str(tmp_path / "alone" / "config.json"), complete=lambda entry: with_sizes(entry, "auto")
    )

    assert facts.num_tower_parameters == count > 0
    assert model_facts(str(model.folder)).num_tower_parameters == count
