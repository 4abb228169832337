"""Tiny random checkpoints of vision models as folders, and images for them."""

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import COMMON, IM_START, VOCAB_SIZE, built_once, rope_fields, write_tokenizer
from tiny_models import FAMILIES as TEXTS
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

PATCH = 14
MAX_PIXELS = 28 * 28 * 64

_PLAIN = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": PATCH,
}
_TURNS = (
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{%- if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}IMAGE"
    "{%- elif part['type'] == 'video' %}VIDEO"
    "{%- else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class _Family:
    tokens: tuple[str, ...]
    """Special tokens after the text tokens; the image token is the first."""
    mark: str
    """Text that the template writes for an image."""
    fields: dict[str, Any]
    """Fields of config.json; names of special tokens are replaced by their ids."""
    preprocessor: dict[str, Any]
    processor: dict[str, Any]
    text: dict[str, Any] = field(default_factory=dict)
    named_tokens: dict[str, str] = field(default_factory=dict)
    """Fields of tokenizer_config.json."""
    video_mark: str = ""
    is_flat: bool = False
    """Whether the text model's fields are at the top level of config.json."""


_QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN_IDS = dict(
    zip(
        ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        _QWEN_TOKENS,
        strict=True,
    )
)
_QWEN_PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 28 * 28 * 4,
    "max_pixels": MAX_PIXELS,
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
_INTERPOLATED = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,
}
_SQUARE = {"height": 56, "width": 56}
_M3_TOKENS = ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[")
PHI4_AUDIO: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_blocks": 1,
    "num_attention_heads": 2,
    "ext_pw_out_channel": 16,
    "depthwise_separable_out_channel": 16,
    "nemo_conv_channels": 16,
}
"""Fields of the audio tower of Phi-4-multimodal."""


def _mrope(*section: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(section)}


def _qwen(version: str, vision: dict[str, Any], text: dict[str, Any]) -> _Family:
    return _Family(
        tokens=_QWEN_TOKENS,
        mark="<|vision_start|><|image_pad|><|vision_end|>",
        fields={
            "vision_config": {
                **vision,
                "num_heads": 2,
                "patch_size": PATCH,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            **_QWEN_IDS,
        },
        preprocessor=_QWEN_PREPROCESSOR,
        processor={"processor_class": f"{version}Processor"},
        text=text,
        video_mark="<|vision_start|><|video_pad|><|vision_end|>",
    )


FAMILIES = {
    "llava": _Family(
        tokens=("<image>",),
        mark="<image>",
        fields={
            "vision_config": {"model_type": "clip_vision_model", **_PLAIN},
            "image_token_index": "<image>",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
        },
        preprocessor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": _SQUARE,
        },
        processor={
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        text={"model_type": "llama"},
    ),
    "qwen2_vl": _qwen(
        "Qwen2VL",
        {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        {"model_type": "qwen2_vl_text", "rope_parameters": _mrope(2, 3, 3)},
    ),
    "qwen3_vl": _qwen(
        "Qwen3VL",
        {**_INTERPOLATED, "deepstack_visual_indexes": [0, 1]},
        {"model_type": "qwen3_vl_text", "head_dim": 16, "rope_parameters": _mrope(4, 2, 2)},
    ),
    **{
        name: _qwen(
            "Qwen3VL",
            _INTERPOLATED,
            {
                **TEXTS[f"{name}_text"],
                "model_type": f"{name}_text",
                "rope_parameters": {**_mrope(4, 2, 2), "partial_rotary_factor": 0.5},
            },
        )
        for name in ("qwen3_5", "qwen3_5_moe")
        if f"{name}_text" in TEXTS
    },
    "mllama": _Family(
        tokens=("<|image|>",),
        mark="<|image|>",
        fields={
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_global_layers": 1,
                "attention_heads": 2,
                "image_size": 56,
                "patch_size": PATCH,
                "intermediate_layers_indices": [0, 2],
                "vision_output_dim": 96,
                "max_num_tiles": 4,
                "supported_aspect_ratios": [
                    *([1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]),
                ],
            },
            "image_token_index": "<|image|>",
        },
        preprocessor={
            "image_processor_type": "MllamaImageProcessor",
            "size": _SQUARE,
            "max_image_tiles": 4,
        },
        processor={"processor_class": "MllamaProcessor"},
        text={
            "model_type": "mllama_text_model",
            "num_hidden_layers": 4,
            "cross_attention_layers": [1, 3],
        },
    ),
    "aya_vision": _Family(
        tokens=("<|IMG_PATCH|>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"),
        mark="<image>",
        fields={
            "vision_config": {"model_type": "siglip_vision_model", **_PLAIN},
            "image_token_index": "<|IMG_PATCH|>",
        },
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": _SQUARE,
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 3,
        },
        processor={
            "processor_class": "AyaVisionProcessor",
            "patch_size": PATCH,
            "img_size": 56,
            "downsample_factor": 2,
        },
        text={"model_type": "cohere2"},
    ),
    "deepseek_vl": _Family(
        tokens=("<image_placeholder>",),
        mark="<image_placeholder>",
        fields={
            "vision_config": {"model_type": "siglip_vision_model", **_PLAIN},
            "image_token_id": "<image_placeholder>",
        },
        preprocessor={
            "image_processor_type": "DeepseekVLImageProcessor",
            "size": _SQUARE,
        },
        processor={"processor_class": "DeepseekVLProcessor", "num_image_tokens": 16},
        text={"model_type": "llama"},
        named_tokens={"image_token": "<image_placeholder>"},
    ),
    "phi4_multimodal": _Family(
        tokens=("<|image|>", "<|audio|>"),
        mark="<|image|>",
        fields={
            "vision_config": {**_PLAIN, "crop_size": 56, "image_token_id": "<|image|>"},
            "audio_config": {**PHI4_AUDIO, "audio_token_id": "<|audio|>"},
        },
        preprocessor={
            "image_processor_type": "Phi4MultimodalImageProcessor",
            "size": _SQUARE,
            "dynamic_hd": 6,
        },
        processor={"processor_class": "Phi4MultimodalProcessor"},
        text={
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
            }
        },
        is_flat=True,
    ),
    "minimax_m3_vl": _Family(
        tokens=_M3_TOKENS,
        mark=_M3_TOKENS[0],
        fields={
            # A head size of 24: three times six numbers are rotated.
            "vision_config": {**_PLAIN, "hidden_size": 48, "temporal_patch_size": 2},
            **{"image_token_index": _M3_TOKENS[0], "projector_hidden_size": 40},
        },
        preprocessor={
            "image_processor_type": "MiniMaxM3VLImageProcessor",
            "min_pixels": 28 * 28 * 4,
            "max_pixels": MAX_PIXELS,
        },
        processor={"processor_class": "MiniMaxM3VLProcessor"},
        # An older transformers lacks the family.
        text={**TEXTS.get("minimax_m3_vl_text", {}), "model_type": "minimax_m3_vl_text"},
    ),
    "gemma3": _Family(
        tokens=("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        mark="<start_of_image>",
        fields={
            "vision_config": {"model_type": "siglip_vision_model", **_PLAIN},
            "mm_tokens_per_image": 4,
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": _SQUARE,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
        text={"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 16},
        named_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    ),
}

UNLISTED = {
    "ovis2": _Family(
        tokens=(
            *("<IMG_ATOM>", "<image>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>"),
            "<IMG_END>",
        ),
        mark="<image>",
        fields={
            "vision_config": {**_PLAIN, "vocab_size": 40, "hidden_stride": 2},
            "image_token_id": "<IMG_ATOM>",
            "visual_indicator_token_ids": [
                *("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
            ],
            "hidden_size": 64,
            "vocab_size": VOCAB_SIZE + 8,
        },
        preprocessor={
            "image_processor_type": "Ovis2ImageProcessor",
            "size": _SQUARE,
            "crop_to_patches": True,
            "max_patches": 3,
        },
        processor={
            "processor_class": "Ovis2Processor",
            "image_token": "<image>",
            "image_seq_length": 4,
        },
        text={"model_type": "qwen2"},
        named_tokens={"image_token": "<image>"},
    ),
    "got_ocr2": _Family(
        tokens=("<imgpad>", "<img>", "</img>"),
        mark="<img><imgpad></img>",
        fields={
            "vision_config": {
                "hidden_size": 32,
                "output_channels": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "mlp_dim": 48,
                "image_size": 256,
                "patch_size": 16,
                "window_size": 4,
                "global_attn_indexes": [1],
            },
            "image_token_index": "<imgpad>",
        },
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 256, "width": 256},
        },
        processor={"processor_class": "GotOcr2Processor"},
        text={"model_type": "qwen2"},
    ),
    "llava_onevision": _Family(
        tokens=("<image>", "<video>"),
        mark="<image>",
        fields={
            "vision_config": {"model_type": "siglip_vision_model", **_PLAIN},
            "image_token_index": "<image>",
            "video_token_index": "<video>",
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
            "vision_aspect_ratio": "anyres_max_4",
        },
        preprocessor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": _SQUARE,
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
        },
        processor={
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
            "image_token": "<image>",
            "video_token": "<video>",
        },
        text={"model_type": "qwen2"},
    ),
    "lighton_ocr": _Family(
        tokens=("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"),
        mark="<|image_pad|>",
        fields={
            "vision_config": {**_PLAIN, "model_type": "pixtral", "head_dim": 16},
            "image_token_id": "<|image_pad|>",
            "spatial_merge_size": 2,
        },
        preprocessor={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 112},
            "patch_size": {"height": PATCH, "width": PATCH},
        },
        processor={
            "processor_class": "LightOnOcrProcessor",
            "patch_size": PATCH,
            "spatial_merge_size": 2,
        },
        text={"model_type": "qwen3"},
        named_tokens={
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
    ),
    "idefics2": _Family(
        tokens=("<image>", "<fake_token_around_image>"),
        mark="<image>",
        fields={
            "vision_config": {"model_type": "idefics2_vision", **_PLAIN},
            "perceiver_config": {
                "hidden_size": 64,
                "resampler_n_latents": 6,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "num_key_value_heads": 1,
                "resampler_head_dim": 16,
            },
            "image_token_id": "<image>",
        },
        preprocessor={
            "image_processor_type": "Idefics2ImageProcessor",
            "size": {"shortest_edge": 28, "longest_edge": 56},
        },
        processor={"processor_class": "Idefics2Processor", "image_seq_len": 6},
        text={"model_type": "mistral"},
    ),
}
"""Families with images that are supported only by transformers."""


@built_once
def make_tiny_vision(
    family: str, folder: Path | str, *, seed: int = 0, weights: bool = True, **overrides: Any
) -> Path:
    """Write a float32 checkpoint of `family`, with its processor, tokenizer and chat template, into
    `folder`; returns the folder. Equal arguments give equal weights. `overrides`: fields of the
    language model's config. Without `weights`, only the other files are written."""
    made = {**FAMILIES, **UNLISTED}[family]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ids = _write_tokenizer(folder, made)
    # Llama 3.2 Vision has the image token after the vocabulary.
    vocab_size = VOCAB_SIZE + (0 if family == "mllama" else 8)
    text = rope_fields({**COMMON, **made.text, **overrides, "vocab_size": vocab_size})
    fields = _with_ids(made.fields, ids) | (text if made.is_flat else {"text_config": text})
    config = AutoConfig.for_model(family, **fields)
    if weights:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _build(config).float()
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias") or "gate" in name.split("_"):
                    parameter.data += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(folder)
    else:
        config.architectures = [_architecture(config)]
        config.save_pretrained(folder)
    for name, content in (
        ("preprocessor_config.json", made.preprocessor),
        ("processor_config.json", made.processor),
    ):
        (folder / name).write_text(json.dumps(content, indent=2))
    return folder


def _with_ids(fields: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    return {
        name: _with_ids(value, ids) if isinstance(value, dict)
        else [ids.get(item, item) for item in value] if isinstance(value, list)
        and all(isinstance(item, str) for item in value)
        else ids.get(value, value) if isinstance(value, str) else value
        for name, value in fields.items()
    }  # fmt: skip


def _build(config: Any) -> Any:
    family = FAMILIES.get(config.model_type)
    is_flat = family is not None and family.is_flat
    kind: Any = AutoModelForCausalLM if is_flat else AutoModelForImageTextToText
    return kind.from_config(config)


def _architecture(config: Any) -> str:
    with torch.device("meta"):
        return type(_build(config)).__name__


def _write_tokenizer(folder: Path, family: _Family) -> dict[str, int]:
    write_tokenizer(folder)
    file = folder / "tokenizer.json"
    encoder = Tokenizer.from_file(str(file))
    encoder.add_special_tokens(list(family.tokens))
    encoder.save(str(file))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = _TURNS.replace("IMAGE", "{{ '" + family.mark + "' }}")
    settings["chat_template"] = template.replace("VIDEO", "{{ '" + family.video_mark + "' }}")
    settings |= family.named_tokens
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    assert encoder.token_to_id("<|im_start|>") == IM_START
    return {token: encoder.token_to_id(token) or 0 for token in family.tokens}


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """An image with shapes and noise; equal arguments give equal images."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    channels = [(x * (3 + seed) + y * (1 + i)) % 256 for i in range(4)]
    pixels = np.stack(channels, axis=-1) + random.integers(0, 40, (height, width, 4))
    return Image.fromarray((pixels % 256).astype(np.uint8), "RGBA").convert(mode)


def clip(width: int, height: int, count: int) -> list[Image.Image]:
    """The frames of a video."""
    return [picture(width, height, seed=seed) for seed in range(count)]


def gif_bytes(frames: list[Image.Image], frame_ms: int = 500) -> bytes:
    """The frames as a GIF animation, lossless up to 256 colors."""
    return image_bytes(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=frame_ms)


def mp4_bytes(frames: list[Image.Image], fps: int = 10, kind: str = "mp4") -> bytes:
    """The frames as an H.264 file, or as VP8 in WebM."""
    av: Any = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as out:
        stream = out.add_stream("libx264" if kind == "mp4" else "libvpx", rate=fps)
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv420p"
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_image(frame)))
        out.mux(stream.encode())
    return file.getvalue()


def image_bytes(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The image as a file of Pillow's format `kind`."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
