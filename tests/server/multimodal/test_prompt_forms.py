"""The text of an image of any size equals the output of transformers' processor classes."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from tiny_vision import picture
from transformers import AutoImageProcessor

from server.multimodal.families.base import ProcessorFiles
from server.multimodal.families.registry import prompt_form
from server.multimodal.image_processor import ImageProcessor
from server.multimodal.llama4_images import Llama4ImageProcessor
from server.multimodal.messages import Setup

SIZES = [(64, 64), (300, 90), (90, 300), (333, 217), (57, 112), (500, 500)]
_SQUARE = {"height": 56, "width": 56}
_PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
_NEXT = {
    "image_processor_type": "LlavaNextImageProcessor",
    "size": {"shortest_edge": 56},
    "crop_size": _SQUARE,
    "image_grid_pinpoints": _PINPOINTS,
}
_NEXT_PROCESSOR = {
    "processor_class": "LlavaNextProcessor",
    "image_token": "<image>",
    "patch_size": 14,
}
_IDEFICS = {
    "size": {"longest_edge": 168},
    "max_image_size": {"longest_edge": 56},
    "do_image_splitting": True,
}


class Family:
    """Checkpoint files, and the attributes that its processor class reads."""

    def __init__(
        self,
        module: str,
        name: str,
        token: str,
        preprocessor: dict[str, Any],
        processor: dict[str, Any],
        theirs: dict[str, Any],
        *,
        config: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.module, self.name, self.token = module, name, token
        self.preprocessor, self.processor, self.theirs = preprocessor, processor, theirs
        self.config, self.options = config or {}, options or {}


FAMILIES = {
    "llava_next": Family(
        "llava_next",
        "LlavaNextProcessor",
        "<image>",
        _NEXT,
        {**_NEXT_PROCESSOR, "vision_feature_select_strategy": "default",
         "num_additional_image_tokens": 1},
        {"image_token": "<image>", "patch_size": 14, "num_additional_image_tokens": 1,
         "vision_feature_select_strategy": "default"},
    ),
    "granite_vision": Family(
        "llava_next",
        "LlavaNextProcessor",
        "<image>",
        _NEXT,
        {**_NEXT_PROCESSOR, "vision_feature_select_strategy": "full",
         "num_additional_image_tokens": 0},
        {"image_token": "<image>", "patch_size": 14, "num_additional_image_tokens": 0,
         "vision_feature_select_strategy": "full"},
    ),
    "gemma3": Family(
        "gemma3",
        "Gemma3Processor",
        "<image_soft_token>",
        {"image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE,
         "do_pan_and_scan": None, "pan_and_scan_min_crop_size": None},
        {"processor_class": "Gemma3Processor", "image_seq_length": 3},
        {"full_image_sequence":
         f"\n\n<start_of_image>{'<image_soft_token>' * 3}<end_of_image>\n\n"},
    ),
    "gemma3_crops": Family(
        "gemma3",
        "Gemma3Processor",
        "<image_soft_token>",
        {"image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE,
         "do_pan_and_scan": None, "pan_and_scan_min_crop_size": None},
        {"processor_class": "Gemma3Processor", "image_seq_length": 3},
        {"full_image_sequence":
         f"\n\n<start_of_image>{'<image_soft_token>' * 3}<end_of_image>\n\n"},
        options={"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20},
    ),
    "internvl_whole": Family(
        "internvl",
        "InternVLProcessor",
        "<IMG_CONTEXT>",
        {"image_processor_type": "GotOcr2ImageProcessor", "size": _SQUARE},
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {"start_image_token": "<img>", "end_image_token": "</img>",
         "image_token": "<IMG_CONTEXT>", "image_seq_length": 4},
        options={"crop_to_patches": False},
    ),
    "idefics3": Family(
        "idefics3",
        "Idefics3Processor",
        "<image>",
        {"image_processor_type": "Idefics3ImageProcessor", **_IDEFICS},
        {"processor_class": "Idefics3Processor", "image_seq_len": 5},
        {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>",
         "global_image_tag": "<global-img>", "image_seq_len": 5},
    ),
    "smolvlm": Family(
        "smolvlm",
        "SmolVLMProcessor",
        "<image>",
        {"image_processor_type": "SmolVLMImageProcessor", **_IDEFICS},
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>",
         "global_image_token": "<global-img>", "image_seq_len": 4},
    ),
    "internvl": Family(
        "internvl",
        "InternVLProcessor",
        "<IMG_CONTEXT>",
        {"image_processor_type": "GotOcr2ImageProcessor", "size": _SQUARE,
         "crop_to_patches": False, "min_patches": 1, "max_patches": 6},
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {"start_image_token": "<img>", "end_image_token": "</img>",
         "image_token": "<IMG_CONTEXT>", "image_seq_length": 4},
    ),
    "qwen2_vl": Family(
        "qwen2_vl",
        "Qwen2VLProcessor",
        "<|image_pad|>",
        {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 784,
         "max_pixels": 784 * 30},
        {"processor_class": "Qwen2VLProcessor"},
        {"image_token": "<|image_pad|>"},
        config={"vision_config": {"spatial_merge_size": 2}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_of_an_image_equals_transformers(
    name: str, size: tuple[int, int], tmp_path: Path
) -> None:
    family = FAMILIES[name]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(family.preprocessor))
    (tmp_path / "processor_config.json").write_text(json.dumps(family.processor))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family.module} | family.config))
    setup = Setup(str(tmp_path), family.token, family.options)

    found = ImageProcessor(setup).process(picture(*size)).text

    assert found == by_transformers(family, tmp_path, picture(*size))
    assert found.count(family.token) > 0


def by_transformers(family: Family, folder: Path, image: Image.Image) -> str:
    """Text from the processor's own method, without a tokenizer and a video processor, which need
    torchvision."""
    module = importlib.import_module(
        f"transformers.models.{family.module}.processing_{family.module}"
    )
    kind = getattr(module, family.name)
    processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
    options = {**getattr(kind, "images_kwargs", {}), **family.options, "return_tensors": "np"}
    arrays = processor(images=[image], **options)
    self = SimpleNamespace(**family.theirs, image_processor=processor)
    for name in ("_get_number_of_features", "_get_unpadded_features"):
        if hasattr(kind, name):
            setattr(self, name, getattr(kind, name).__get__(self))
    return kind.replace_image_token(self, arrays, 0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_llama_4_writes_tiles_and_separators_as_transformers(
    size: tuple[int, int], tmp_path: Path
) -> None:
    fields = {"size": _SQUARE, "max_patches": 6}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Llama4Processor"}')
    (tmp_path / "config.json").write_text('{"model_type": "llama4"}')
    form = prompt_form(ProcessorFiles.read(tmp_path, "<|patch|>"))
    arrays = Llama4ImageProcessor(fields)(images=[picture(*size)])

    found = form.text(arrays)

    module = importlib.import_module("transformers.models.llama4.processing_llama4")
    kind = module.Llama4Processor
    theirs = SimpleNamespace(patch_size=14, downsample_ratio=4)
    theirs._prompt_split_image = kind._prompt_split_image.__get__(theirs)
    assert found == kind.replace_image_token(theirs, arrays, 0)
    assert found.count("<|patch|>") == 4 * len(arrays["pixel_values"])
    assert form.mark == "<|image|>"


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_pixtral_has_a_token_after_each_row(size: tuple[int, int], tmp_path: Path) -> None:
    """Checked against expected text, because the processor class needs torchvision."""
    preprocessor = {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 168},
        "patch_size": {"height": 14, "width": 14},
    }
    processor_config = {"processor_class": "PixtralProcessor", "patch_size": 14,
                        "spatial_merge_size": 2}  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (tmp_path / "processor_config.json").write_text(json.dumps(processor_config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3"}))
    form = prompt_form(ProcessorFiles.read(tmp_path, "[IMG]"))
    processor: Any = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    arrays = processor(images=[picture(*size)], return_tensors="np", **form.options)

    found = form.text(arrays)

    height, width = arrays["image_sizes"][0]
    assert height % 28 == width % 28 == 0
    rows = ["[IMG]" * (width // 28)] * (height // 28)
    assert found == "[IMG_BREAK]".join(rows) + "[IMG_END]"
