"""Invalid fields of image processors: a ConfigError at start that names the field and its value,
for every family."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from config.errors import ConfigError
from server.multimodal.families.base import MAX_TOKEN_CHARACTERS, ProcessorFiles
from server.multimodal.families.lfm2_vl import Lfm2VlImageProcessor
from server.multimodal.families.registry import prompt_form
from server.multimodal.isolated import prepare
from server.multimodal.llama4_images import Llama4ImageProcessor
from server.multimodal.messages import ImageFacts, Setup
from server.multimodal.phi4_images import Phi4ImageProcessor
from server.multimodal.processor_fields import check_fields, processor_fields

COUNT: list[Any] = ["ten", -1, 0, 1.5, True, [], {}, 10**12]
FLAG: list[Any] = ["yes", 1, []]
NUMBER: list[Any] = ["x", 0, -1.0, [], 1e40]
WORD: list[Any] = [1, [], "", "x" * (MAX_TOKEN_CHARACTERS + 1)]
CHANNELS: list[Any] = ["x", {}, ["a"] * 3, [None] * 3, [1e40] * 3, [0.5] * 2]
DEVIATIONS: list[Any] = [*CHANNELS, 0, [0.5, 0, 0.5], [-0.5] * 3]
RESAMPLE: list[Any] = ["bicubic", -1, 100, 1.5, []]
SQUARE: list[Any] = [
    "x",
    336,
    {"height": 336, "width": 448},
    {"height": 0, "width": 0},
    {"height": 10**9, "width": 10**9},
]
SIZE: list[Any] = ["x", True, -1, 10**12, {"height": 0}, {"height": "x"}, [1, -1]]
PINPOINTS: list[Any] = ["x", [], [[56]], [[56, 0]], [[56, "x"]], [[56, 56]] * 2_000]

LFM2: dict[str, list[Any]] = {
    **dict.fromkeys(("downsample_factor", "encoder_patch_size", "tile_size"), COUNT),
    **dict.fromkeys(("min_tiles", "max_tiles"), COUNT),
    **dict.fromkeys(("min_image_tokens", "max_image_tokens"), COUNT),
    **dict.fromkeys(("do_image_splitting", "use_thumbnail"), FLAG),
    "max_pixels_tolerance": NUMBER,
    "image_mean": CHANNELS,
    "image_std": DEVIATIONS,
    "resample": RESAMPLE,
}
LLAMA4 = {
    "size": SQUARE,
    "resize_to_max_canvas": FLAG,
    "max_patches": COUNT,
    "image_mean": CHANNELS,
    "image_std": DEVIATIONS,
    "resample": RESAMPLE,
}
PHI4 = {
    "size": SQUARE,
    "patch_size": COUNT,
    "dynamic_hd": COUNT,
    "image_mean": CHANNELS,
    "image_std": DEVIATIONS,
}
COMMON = {
    **dict.fromkeys(("patch_size", "merge_size", "min_pixels", "max_pixels"), COUNT[:6]),
    **dict.fromkeys(("do_resize", "do_normalize", "use_thumbnail"), FLAG),
    **dict.fromkeys(("size", "crop_size", "max_image_size"), SIZE),
    "rescale_factor": NUMBER,
    "image_mean": CHANNELS[:5],
    "image_std": [*CHANNELS[:5], 0, [0.5, 0, 0.5]],
    "resample": RESAMPLE,
}
FORMS: dict[str, dict[str, list[Any]]] = {
    "aya_vision": {
        **dict.fromkeys(("patch_size", "downsample_factor", "img_size"), COUNT),
        **dict.fromkeys(("image_token", "img_patch_token", "tile_token"), WORD),
    },
    "deepseek_vl": {"num_image_tokens": COUNT},
    "gemma3": {"image_seq_length": COUNT},
    "idefics3": {"image_seq_len": COUNT},
    "internvl": {"image_seq_length": COUNT},
    "lfm2_vl": {"downsample_factor": COUNT, "use_image_special_tokens": FLAG},
    "llama4": {
        "patch_size": COUNT,
        "pixel_shuffle_ratio": NUMBER,
        **dict.fromkeys(("image_token", "fake_image_token", "tile_x_separator_token"), WORD),
    },
    "llava": {
        "patch_size": COUNT,
        "image_token": WORD,
        "vision_feature_select_strategy": WORD,
        "num_additional_image_tokens": ["x", -1, 1.5, True, 10**12],
    },
    "llava_next": {"image_grid_pinpoints": PINPOINTS},
    "pixtral": {
        "patch_size": [*COUNT[:6], {"height": 0}, {}],
        "spatial_merge_size": COUNT,
        **dict.fromkeys(("image_break_token", "image_end_token"), WORD),
    },
    "qwen2_vl": dict.fromkeys(("merge_size", "temporal_patch_size"), COUNT),
    "qwen2_5_vl": {"tokens_per_second": NUMBER},
    "qwen3_vl": {"patch_size": COUNT},
}
NEEDED = {"patch_size": 14, "image_grid_pinpoints": [[56, 112]], "merge_size": 2}


def make_form(model_type: str) -> Callable[[dict[str, Any]], object]:
    def make(fields: dict[str, Any]) -> object:
        files = ProcessorFiles({"model_type": model_type}, {**NEEDED, **fields}, {}, "<i>", "<v>")
        return prompt_form(files)

    return make


MAKERS: Mapping[str, tuple[Callable[[dict[str, Any]], object], dict[str, list[Any]]]] = {
    "Lfm2Vl": (Lfm2VlImageProcessor, LFM2),
    "Llama4": (Llama4ImageProcessor, LLAMA4),
    "Phi4": (Phi4ImageProcessor, PHI4),
    "common": (lambda fields: check_fields(processor_fields(fields)), COMMON),
    **{name: (make_form(name), fields) for name, fields in FORMS.items()},
}


@pytest.mark.parametrize(
    ("family", "field"), [(family, field) for family in MAKERS for field in MAKERS[family][1]]
)
def test_the_error_names_a_wrong_field_and_its_value(family: str, field: str) -> None:
    make, fields = MAKERS[family]

    for value in fields[field]:
        with pytest.raises(ConfigError) as caught:
            make({field: value})

        message = str(caught.value)
        assert field in message, value
        # For lists and objects, the message names the entry or the inner field.
        if isinstance(value, (int, float)) or value in ("ten", "yes"):
            assert repr(value) in message or f"{value:g}" in message


def test_published_fields_are_accepted() -> None:
    for fields in (
        {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}, "patch_size": 14},
        {"size": 224, "crop_size": [224, 224], "image_mean": [0.48, 0.46, 0.41]},
        {"size": {"height": 364, "width": 364}, "rescale_factor": 0.00392156862745098},
        {"patch_size": {"height": 16, "width": 16}, "size": {"longest_edge": 1540}},
        {"image_mean": 0.5, "image_std": 0.5, "resample": 3, "do_resize": None, "crop_size": None},
        {"image_processor": {"image_std": [0.5, 0.5, 0.5], "do_pad": True}},
    ):
        check_fields(processor_fields(fields))


def test_the_error_names_the_path_of_a_nested_processors_field() -> None:
    with pytest.raises(ConfigError, match="image_std in image_processor in preprocessor_config"):
        check_fields(processor_fields({"image_processor": {"image_std": [0, 1, 1]}}))


CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 56},
    "crop_size": {"height": 56, "width": 56},
}


def error_at_start(folder: Path, fields: dict[str, Any], video: dict[str, Any]) -> str:
    (folder / "config.json").write_text('{"model_type": "llava"}')
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**CLIP, "patch_size": 14, **fields})
    )
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    call = prepare(msgspec.msgpack.encode(Setup(str(folder), "<image>", {})))
    return msgspec.msgpack.decode(call(b""), type=ImageFacts).error


@pytest.mark.parametrize(
    ("fields", "video", "words"),
    [
        ({}, {}, ""),
        ({"image_std": [0, 0, 0]}, {}, "image_std in preprocessor_config.json is 0"),
        ({}, {"size": {"longest_edge": "x"}}, "longest_edge in size in video_preprocessor"),
        # Only a trial run finds this error: the processor of this class needs both sides.
        ({"crop_size": {"height": 56}}, {}, "crop_size"),
    ],
    ids=["right", "deviation", "video", "trial"],
)
def test_the_start_fails_with_the_name_of_the_field(
    fields: dict[str, Any], video: dict[str, Any], words: str, tmp_path: Path
) -> None:
    error = error_at_start(tmp_path, fields, video)

    assert words in error and bool(words) == bool(error)


@pytest.mark.parametrize("content", [b"{", b"\xff", b'{"size": ' + b"[" * 100_000, b""])
def test_a_damaged_file_is_an_error_with_its_name(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    file.write_bytes(content)

    with pytest.raises(ConfigError, match=r"preprocessor_config.json cannot be read"):
        ProcessorFiles.read(tmp_path, "<image>")


def test_a_file_that_is_too_large_is_an_error_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.multimodal.families.base.MAX_JSON_BYTES", 9)
    (tmp_path / "preprocessor_config.json").write_text('{"size": 10}')

    with pytest.raises(ConfigError, match=r"preprocessor_config.json cannot be read: .* 12 bytes"):
        ProcessorFiles.read(tmp_path, "<image>")


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_non_finite_numbers_fail_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.multimodal.image_processor.check_fields", lambda fields: None)

    error = error_at_start(tmp_path, {"image_std": [1e-45, 1, 1]}, {})

    assert "pixel_values of an image has numbers that are not finite" in error
