"""Tiny random checkpoints of vision models, images for them, and the results of transformers'
multimodal models."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES as TEXTS
from tiny_models import VOCAB_SIZE, write_tokenizer
from tiny_vision import PHI4_AUDIO
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from server.multimodal.families.lfm2_vl import Lfm2VlImageProcessor
from server.multimodal.phi4_images import Phi4ImageProcessor

IMAGE, BREAK, START, VIDEO, END = 310, 311, 312, 313, 314
"""Tokens of the checkpoints."""
SIZES = ((60, 45), (31, 52), (28, 28), (90, 33))
"""(width, height) of the images."""

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
    "initializer_range": 0.2,
}
_MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    "use_sliding_window": False,
}
_INTERLEAVED: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_INTERPOLATED: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 14,
    "num_position_embeddings": 25,
    "initializer_range": 0.2,
}
_DEEPSTACK = {**_INTERPOLATED, "deepstack_visual_indexes": [0, 1]}
_HALF_ROTATED: dict[str, Any] = {
    "rope_parameters": {**_INTERLEAVED["rope_parameters"], "partial_rotary_factor": 0.5},
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}

_MLLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_global_layers": 1,
    "attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "intermediate_layers_indices": [0, 2],
    "vision_output_dim": 96,
    "max_num_tiles": 4,
    "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
}


@dataclass
class Picture:
    """An image in the form in which the server sends it."""

    tensors: dict[str, Tensor]
    tokens: list[int]
    """Tokens in place of the image in the prompt."""
    num_embeddings: int
    grid: tuple[int, int, int] = (0, 0, 0)


Process = Callable[[list[Image.Image]], list[dict[str, Tensor]]]
"""Function that returns the tensors of each image."""


@dataclass(frozen=True)
class VisionFamily:
    """A family of multimodal models."""

    model_type: str
    text: dict[str, Any]
    vision: dict[str, Any]
    process: Process
    whole: dict[str, Any] = field(default_factory=dict)
    layout: Callable[[dict[str, Tensor], int], list[int]] = lambda tensors, count: [IMAGE] * count
    joined: Callable[[list[dict[str, Tensor]]], dict[str, Tensor]] = lambda all_tensors: {
        name: torch.cat([tensors[name] for tensors in all_tensors]) for name in all_tensors[0]
    }
    """Joins the tensors of all images of a prompt into the arguments of transformers' model."""
    is_flat: bool = False
    """Whether the text model's fields are at the top level of config.json."""
    grid: Callable[[dict[str, Tensor]], tuple[int, int, int]] = lambda tensors: (0, 0, 0)


def _each(processor: Any, *names: str) -> Process:
    def process(images: list[Image.Image]) -> list[dict[str, Tensor]]:
        found = []
        for image in images:
            output = processor(images=[image], return_tensors="pt")
            found.append({name: output[name] for name in names or ("pixel_values",)})
        return found

    return process


def _tiles(images: list[Image.Image]) -> list[dict[str, Tensor]]:
    """One to three tiles of noise, for a processor that needs torchvision."""
    return [
        {
            "pixel_values": torch.randn(
                1 + image.width % 3, 3, 28, 28, generator=torch.Generator().manual_seed(image.width)
            )
        }
        for image in images
    ]


def _padded(all_tensors: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Images of several sizes, padded at the end."""
    pixels = [tensors["pixel_values"] for tensors in all_tensors]
    shape = [max(sizes) for sizes in zip(*(image.shape[1:] for image in pixels), strict=True)]
    batch = torch.zeros(len(pixels), *shape)
    for index, item in enumerate(pixels):
        batch[index, : item.shape[1], : item.shape[2], : item.shape[3]] = item[0]
    sizes = torch.cat([tensors["image_sizes"] for tensors in all_tensors])
    return {"pixel_values": batch, "image_sizes": sizes}


def _lfm2(images: list[Image.Image]) -> list[dict[str, Tensor]]:
    processor = Lfm2VlImageProcessor(
        {
            **{"encoder_patch_size": 7, "tile_size": 28, "min_image_tokens": 1, "max_tiles": 4},
            **{"max_image_tokens": 6, "max_pixels_tolerance": 1.0},
        }
    )
    names = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
    found = [processor(images=[image]) for image in images]
    return [{name: torch.from_numpy(tensor[name]) for name in names} for tensor in found]


def _with_all_patches(all_tensors: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tiles padded at the end to the largest number of patches."""
    most = max(tensors["pixel_values"].shape[1] for tensors in all_tensors)
    found: dict[str, list[Tensor]] = {name: [] for name in all_tensors[0]}
    for tensors in all_tensors:
        for name, tensor in tensors.items():
            if name != "spatial_shapes":
                shape = (len(tensor), most - tensor.shape[1], *tensor.shape[2:])
                tensor = torch.cat((tensor, tensor.new_zeros(shape)), dim=1)
            found[name].append(tensor)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _rows_of_pixtral(tensors: dict[str, Tensor], count: int) -> list[int]:
    width = int(tensors["image_sizes"][0, 1]) // 14
    tokens: list[int] = []
    for _ in range(count // width):
        tokens += [*[IMAGE] * width, BREAK]
    return [*tokens[:-1], END]


def _tiles_of_idefics(tensors: dict[str, Tensor], count: int) -> list[int]:
    num_tiles = tensors["pixel_values"].shape[1]
    return [START, *[IMAGE] * (count // num_tiles)] * num_tiles + [START]


def _joined_tiles(all_tensors: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.cat([tensors[name] for tensors in all_tensors], dim=1)
        for name in all_tensors[0]
    }


def _phi4(images: list[Image.Image]) -> list[dict[str, Tensor]]:
    processor = Phi4ImageProcessor({**_SQUARE, "patch_size": 7, "dynamic_hd": 6})
    names = ("image_pixel_values", "image_sizes", "image_attention_mask")
    found = [processor(images=[image]) for image in images]
    return [{name: torch.from_numpy(entry[name]) for name in names} for entry in found]


def _with_all_crops(all_tensors: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of all images, padded to the largest number of crops."""
    most = max(tensors["image_pixel_values"].shape[1] for tensors in all_tensors)
    found: dict[str, list[Tensor]] = {name: [] for name in all_tensors[0]}
    for tensors in all_tensors:
        for name, tensor in tensors.items():
            if name != "image_sizes":
                shape = (1, most - tensor.shape[1], *tensor.shape[2:])
                # The mask is padded in the same way; the model ignores the padding.
                tensor = torch.cat((tensor, torch.ones(shape)), dim=1)
            found[name].append(tensor)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _qwen_grid(tensors: dict[str, Tensor]) -> tuple[int, int, int]:
    time, height, width = tensors["image_grid_thw"][0].tolist()
    return time, height // 2, width // 2


_SQUARE = {"size": {"height": 28, "width": 28}}
_CLIP = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
_QWEN = _each(
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 9),
    "pixel_values",
    "image_grid_thw",
)
_IDEFICS = _each(
    Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
    "pixel_values",
    "pixel_attention_mask",
)
_IDEFICS_WHOLE = {"scale_factor": 2, "image_token_id": IMAGE}
_PIXTRAL = _each(
    PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size={"height": 14, "width": 14}),
    "pixel_values",
    "image_sizes",
)
_NEXT = _each(
    LlavaNextImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
    ),
    "pixel_values",
    "image_sizes",
)
_NEXT_WHOLE = {
    "image_token_index": IMAGE,
    "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
    "image_seq_length": 16,
}


def _qwen(model_type: str, text: dict[str, Any], vision: dict[str, Any]) -> VisionFamily:
    return VisionFamily(
        model_type,
        text,
        vision,
        _QWEN,
        {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START},
        lambda tensors, count: [START, *[IMAGE] * count, END],
        grid=_qwen_grid,
    )


QWEN_STATES = ("qwen3_5", "qwen3_5_moe")
WITH_STATES = (*QWEN_STATES, "lfm2_vl")
"""Families with layers that keep a state per request, without prefix caching."""
VISION_FAMILIES: dict[str, VisionFamily] = {
    "llava": VisionFamily(
        "llava",
        {"model_type": "llama"},
        {**VISION, "model_type": "clip_vision_model"},
        _each(_CLIP),
        {"image_token_index": IMAGE, "image_seq_length": 16},
    ),
    "llava_next": VisionFamily(
        "llava_next",
        {"model_type": "mistral", "sliding_window": None},
        {**VISION, "model_type": "clip_vision_model"},
        _NEXT,
        _NEXT_WHOLE,
        joined=_padded,
    ),
    "granite_vision": VisionFamily(
        "llava_next",
        {
            "model_type": "granite",
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        {**VISION, "model_type": "siglip_vision_model"},
        _NEXT,
        {
            **_NEXT_WHOLE,
            "vision_feature_layer": [-2, -1],
            "vision_feature_select_strategy": "full",
        },
        joined=_padded,
    ),
    "gemma3": VisionFamily(
        "gemma3",
        {
            "model_type": "gemma3_text",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
        {**VISION, "model_type": "siglip_vision_model"},
        _each(SiglipImageProcessorPil(**_SQUARE)),
        {
            "image_token_index": IMAGE,
            "boi_token_index": START,
            "eoi_token_index": END,
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": True,
        },
    ),
    "mistral3": VisionFamily(
        "mistral3",
        {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
        {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 56},
        _PIXTRAL,
        {"image_token_index": IMAGE, "spatial_merge_size": 2, "vision_feature_layer": -1},
        _rows_of_pixtral,
        _padded,
    ),
    "pixtral": VisionFamily(
        "llava",
        {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
        {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 56, "patch_size": 14},
        _PIXTRAL,
        {
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        _rows_of_pixtral,
        _padded,
    ),
    "idefics3": VisionFamily(
        "idefics3",
        {"model_type": "llama"},
        {**VISION, "model_type": "idefics3_vision"},
        _IDEFICS,
        _IDEFICS_WHOLE,
        _tiles_of_idefics,
        _joined_tiles,
    ),
    "smolvlm": VisionFamily(
        "smolvlm",
        {"model_type": "llama"},
        {**VISION, "model_type": "smolvlm_vision"},
        _IDEFICS,
        _IDEFICS_WHOLE,
        _tiles_of_idefics,
        _joined_tiles,
    ),
    "aya_vision": VisionFamily(
        "aya_vision",
        {
            "model_type": "cohere2",
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
        },
        {**VISION, "model_type": "siglip_vision_model"},
        _each(
            GotOcr2ImageProcessorPil(**_SQUARE, crop_to_patches=True, min_patches=1, max_patches=3)
        ),
        {"image_token_index": IMAGE, "downsample_factor": 2, "tie_word_embeddings": True},
        lambda tensors, count: [START, *[IMAGE] * count, END],
    ),
    "deepseek_vl": VisionFamily(
        "deepseek_vl",
        {"model_type": "llama"},
        {**VISION, "model_type": "siglip_vision_model"},
        _each(SiglipImageProcessorPil(**_SQUARE)),
        {"image_token_id": IMAGE},
    ),
    "vipllava": VisionFamily(
        "vipllava",
        {"model_type": "llama"},
        {**VISION, "model_type": "clip_vision_model"},
        _each(_CLIP),
        {
            "image_token_index": IMAGE,
            "image_seq_length": 16,
            "vision_feature_layers": [-1, -2, 1],
        },
    ),
    "internvl": VisionFamily(
        "internvl",
        {"model_type": "qwen2", "use_sliding_window": False},
        {
            **VISION,
            "model_type": "internvl_vision",
            "image_size": [28, 28],
            "patch_size": [7, 7],
        },
        _each(
            GotOcr2ImageProcessorPil(**_SQUARE, crop_to_patches=True, min_patches=1, max_patches=3)
        ),
        {"image_token_id": IMAGE, "image_seq_length": 4},
        lambda tensors, count: [START, *[IMAGE] * count, END],
    ),
    "phi4_multimodal": VisionFamily(
        "phi4_multimodal",
        {
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        },
        {**VISION, "num_hidden_layers": 3, "crop_size": 28, "image_token_id": IMAGE},
        _phi4,
        {"audio_config": {**PHI4_AUDIO, "audio_token_id": VIDEO}},
        joined=_with_all_crops,
        is_flat=True,
    ),
    "minimax_m3": VisionFamily(
        "minimax_m3_vl",
        {
            **TEXTS.get("minimax_m3_vl_text", {}),
            **{"model_type": "minimax_m3_vl_text", "index_block_size": 8},
            **{"num_attention_heads": 4, "num_key_value_heads": 2},
        },
        # A head size of 24: three times six numbers are rotated.
        {**VISION, "hidden_size": 48, "patch_size": 14, "temporal_patch_size": 2},
        _QWEN,
        {"image_token_index": IMAGE, "projector_hidden_size": 40},
        lambda tensors, count: [START, *[IMAGE] * count, END],
    ),
    "lfm2_vl": VisionFamily(
        "lfm2_vl",
        {**TEXTS["lfm2"], "model_type": "lfm2"},
        {**VISION, "model_type": "siglip2_vision_model", "num_patches": 16},
        _lfm2,
        {"image_token_id": IMAGE, "downsample_factor": 2, "projector_hidden_size": 40},
        lambda tensors, count: [START, *[IMAGE] * count, END],
        _with_all_patches,
    ),
    "llama4": VisionFamily(
        "llama4",
        {
            "model_type": "llama4_text",
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "head_dim": 16,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
            "no_rope_layer_interval": 2,
        },
        {
            **VISION,
            "model_type": "llama4_vision_model",
            "vision_output_dim": 24,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
            "intermediate_size": 128,
            "pixel_shuffle_ratio": 0.5,
        },
        _tiles,
        {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END},
    ),
    "qwen2_vl": _qwen(
        "qwen2_vl",
        {**_MROPE, "model_type": "qwen2_vl_text"},
        {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2},
    ),
    "mllama": VisionFamily(
        "mllama",
        {
            "model_type": "mllama_text_model",
            # The image token is after the tokens that can be sampled.
            "vocab_size": IMAGE,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "cross_attention_layers": [1, 3],
        },
        _MLLAMA,
        _each(
            MllamaImageProcessorPil(size={"height": 56, "width": 56}, max_image_tiles=4),
            *("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"),
        ),
        {"image_token_index": IMAGE},
        lambda tensors, count: [IMAGE],
        _joined_tiles,
    ),
    "qwen3_vl": _qwen(
        "qwen3_vl",
        {**_INTERLEAVED, "model_type": "qwen3_vl_text", "num_hidden_layers": 3, "head_dim": 16},
        _DEEPSTACK,
    ),
    "qwen3_vl_moe": _qwen(
        "qwen3_vl_moe",
        {
            **_INTERLEAVED,
            "model_type": "qwen3_vl_moe_text",
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        _DEEPSTACK,
    ),
    **{
        name: _qwen(
            name,
            {**TEXTS[f"{name}_text"], **_HALF_ROTATED, "model_type": f"{name}_text"},
            _INTERPOLATED,
        )
        for name in QWEN_STATES
    },
    "qwen2_5_vl": _qwen(
        "qwen2_5_vl",
        {**_MROPE, "model_type": "qwen2_5_vl_text"},
        {
            **VISION,
            "depth": 2,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
    ),
}


def make_tiny_vision(
    name: str, folder: Path, vision: dict[str, Any] | None = None, **text: Any
) -> Any:
    """Write a checkpoint of the family; `text` replaces fields of the text model, `vision` fields
    of the tower. Returns transformers' multimodal model in float32."""
    family = VISION_FAMILIES[name]
    text = {**TEXT, **family.text, **text}
    whole_fields = {"tie_word_embeddings": False, **family.whole}
    config = AutoConfig.for_model(
        family.model_type,
        vision_config={**family.vision, **(vision or {})},
        **({**text, **whole_fields} if family.is_flat else {"text_config": text, **whole_fields}),
    )
    kind: Any = AutoModelForCausalLM if family.is_flat else AutoModelForImageTextToText
    torch.manual_seed(4)
    whole = kind.from_config(config).float().eval()
    for parameter in whole.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter.data, std=0.2)
    whole.save_pretrained(folder)
    if name == "qwen3_vl_moe":
        _write_published_experts(folder / "model.safetensors")
    write_tokenizer(folder)
    if name == "phi4_multimodal":
        # Its layers are marked as causal. With sdpa, transformers 5.24 applies this to images
        # without padding, but not to images with padding.
        tower = whole.model.embed_tokens_extend.image_embed.img_processor
        tower.set_attn_implementation("eager")
    if name == "llama4":
        # The forward pass of transformers 5.24 reads `image_outputs` of the language model's
        # output, which no language model sets, so it fails with and without images.
        whole.language_model.register_forward_hook(_set_no_image_outputs)
    return whole


def _write_published_experts(file: Path) -> None:
    """Transpose the experts: published checkpoints of Qwen3-VL have (experts, in, out), while
    transformers 5 saves (experts, out, in) and reads both."""
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def _set_no_image_outputs(module: Any, given: Any, output: Any) -> None:
    if not hasattr(output, "image_outputs"):
        output.image_outputs = None


def draw(index: int) -> Image.Image:
    """An image that differs for each index."""
    width, height = SIZES[index % len(SIZES)]
    noise = np.random.default_rng(index).integers(0, 256, (height, width, 3), np.uint8)
    noise[: height // 2, :, index % 3] = 250
    return Image.fromarray(noise)


@torch.inference_mode()
def prepare(name: str, whole: Any, indices: list[int]) -> list[Picture]:
    """The images with these indices."""
    family = VISION_FAMILIES[name]
    found = []
    for tensors in family.process([draw(index) for index in indices]):
        count = count_embeddings(whole, tensors)
        layout = family.layout(tensors, count)
        found.append(Picture(tensors, layout, count, family.grid(tensors)))
    return found


def count_embeddings(whole: Any, tensors: dict[str, Tensor]) -> int:
    """Number of embeddings that the model makes from an image."""
    if whole.config.model_type == "mllama":
        return int(tensors["aspect_ratio_mask"].shape[-1])
    if whole.config.model_type == "phi4_multimodal":
        return _count_of_phi4(tensors)
    source = whole if hasattr(whole, "get_image_features") else whole.model
    output = source.get_image_features(**tensors)
    features = output.last_hidden_state if whole.config.model_type == "llama4" else None
    if features is None:
        features = output.pooler_output
    if isinstance(features, list | tuple):
        return sum(len(feature) for feature in features)
    return int(features.shape[:-1].numel())


def _count_of_phi4(tensors: dict[str, Tensor]) -> int:
    """Count of the model's processor: patches, a token at the end of each row, and a separator."""
    rows, columns = (tensors["image_sizes"][0] // 28).tolist()
    crops = tensors["image_attention_mask"][0, 1:, ::2, ::2]
    seen = crops.view(rows, columns, 2, 2).transpose(1, 2).reshape(2 * rows, 2 * columns)
    return int(2 * (2 + 1) + 1 + seen.sum() + seen[:, 0].sum())


@torch.inference_mode()
def generate(
    name: str, whole: Any, tokens: list[int], pictures: list[Picture], count: int
) -> list[int]:
    """Greedy tokens of transformers."""
    given: dict[str, Any] = {}
    ids = torch.tensor([tokens])
    if pictures:
        given |= VISION_FAMILIES[name].joined([picture.tensors for picture in pictures])
    kinds = (ids == IMAGE).long()
    if whole.config.model_type == "mllama" and pictures:
        given["cross_attention_mask"] = cross_attention_mask(tokens, pictures)
    if whole.config.model_type == "gemma3":
        given["token_type_ids"] = kinds
    elif whole.config.model_type.startswith("qwen"):
        given["mm_token_type_ids"] = kinds
    output = whole.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **given,
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
    )
    return output[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


def cross_attention_mask(tokens: list[int], pictures: list[Picture]) -> Tensor:
    """Mask of the tiles that the tokens of a prompt attend to, from the processor of
    transformers."""
    masks = [picture.tensors["aspect_ratio_mask"] for picture in pictures]
    return torch.from_numpy(
        convert_sparse_cross_attention_mask_to_dense(
            [get_cross_attention_token_mask(tokens, IMAGE)],
            [[int(mask.sum()) for mask in masks]],
            max_num_tiles=masks[0].shape[-1],
            length=len(tokens),
        )
    )
