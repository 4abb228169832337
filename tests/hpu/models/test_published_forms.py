"""Checkpoints in the forms that publishers release and that transformers 5 saves: the text model
compared with transformers in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import assert_same_as_transformers, greedy_by_pages, load_reference, random_prompts
from paged_harness import load_decoder
from quantized_checkpoints import FORMATS, quantize
from releases import transformers_before
from safetensors.torch import load_file, save_file
from tiny_models import COMMON, FAMILIES, VOCAB_SIZE, make_tiny
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from config.checkpoint.facts import model_facts
from config.model.read_config import read_model_config
from hpu.model_loader.size_estimate import count_parameters

if transformers_before("5.18"):
    pytest.skip("needs the interfaces of transformers 5.18", allow_module_level=True)

NEW_TOKENS, TOLERANCE = 8, 1e-3
IMAGE = VOCAB_SIZE - 1
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
QWEN: dict[str, Any] = {
    "rope_parameters": {
        **ROPE,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
MINISTRAL: dict[str, Any] = {
    "head_dim": 16,
    "initializer_range": 0.3,
    "rope_parameters": {
        **ROPE,
        **{"rope_type": "yarn", "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        **{"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
    },
}
GLM: dict[str, Any] = {
    "head_dim": 16,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}
ERNIE: dict[str, Any] = {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": [48, 32],
    "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]},
}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14}
LAYERS = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2}
BLOCKS = {**VISION, "depth": 1, "num_heads": 2}
QWEN_BLOCKS = {**BLOCKS, "patch_size": 4, "out_hidden_size": 64, "num_position_embeddings": 16}
GLM_BLOCKS = {**BLOCKS, "image_size": 28, "out_hidden_size": 64}
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", QWEN, QWEN_BLOCKS),
    "qwen3_5_moe": ("qwen3_5_moe_text", QWEN, QWEN_BLOCKS),
    # Experts are saved as (experts, out, in), and published as (experts, in, out).
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            "rope_parameters": {**QWEN["rope_parameters"], "partial_rotary_factor": 1.0},
            "head_dim": 8,
        },
        {**QWEN_BLOCKS, "deepstack_visual_indexes": [0]},
    ),
    "glm4v": ("glm4v_text", GLM, GLM_BLOCKS),
    "glm4v_moe": (
        "glm4v_moe_text",
        {**FAMILIES["glm4_moe"], **GLM, "use_qk_norm": False},
        GLM_BLOCKS,
    ),
    "kimi_k25": ("deepseek_v3", {}, LAYERS),
    "ernie4_5_vl_moe": ("ernie4_5_vl_moe_text", ERNIE, BLOCKS),
    "mistral3": ("ministral3", MINISTRAL, {**LAYERS, "model_type": "pixtral", "image_size": 28}),
    "aria": (
        "aria_text",
        {"moe_num_experts": 4, "moe_topk": 2},
        {**LAYERS, "model_type": "idefics3_vision", "image_size": 28},
    ),
    "deepseek_ocr2": (
        "deepseek_ocr2_text",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "mlp_layer_types": ["dense", "sparse"],
            "rms_norm_eps": 1e-6,
        },
        {
            "sam_config": {
                **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
                **{"image_size": 32, "mlp_dim": 16, "output_channels": 8},
                **{"downsample_channels": [8, 8], "global_attn_indexes": [0]},
            },
            "encoder_config": {
                **{"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1},
                **{"num_attention_heads": 2, "num_key_value_heads": 2},
            },
        },
    ),
    "lfm2_vl": (
        "lfm2",
        {},
        {**LAYERS, "model_type": "siglip2_vision_model", "num_patches": 16},
    ),
    "minimax_m3_vl": ("minimax_m3_vl_text", {}, {**LAYERS, "image_size": 28, "hidden_size": 48}),
    "paddleocr_vl": (
        "paddleocr_vl_text",
        {"head_dim": 16, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
        {**LAYERS, "model_type": "paddleocr_vl_vision", "image_size": 28},
    ),
    "internvl": (
        "gpt_oss",
        {"swiglu_limit": 7.0},
        {**LAYERS, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
    ),
}
"""Multimodal model_type -> model_type of its text model, fields of the text model, and the vision
config."""


def make_whole(model_type: str, folder: Path) -> Any:
    """Write the checkpoint of a multimodal model as transformers does, and return the model of
    transformers."""
    text_type, text, vision = WHOLE[model_type]
    text = {**COMMON, **FAMILIES.get(text_type, {}), **text, "model_type": text_type}
    config = AutoConfig.for_model(
        model_type,
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    torch.manual_seed(2)
    whole = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")  # type: ignore[no-untyped-call]  # theirs
    whole = whole.float().eval()
    whole.save_pretrained(folder)
    return whole


def rewrite(folder: Path, change: Any) -> None:
    """Replace the tensors of the checkpoint by the result of `change`."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def assert_served_as_by(reference: Any, folder: Path) -> None:
    prompts = random_prompts(1, 40)
    model = load_decoder(folder)

    found = greedy_by_pages(model, prompts, NEW_TOKENS)

    assert_same_as_transformers(found, prompts, reference, TOLERANCE)
    sizes = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(model_facts(str(folder))) == sizes


@pytest.mark.parametrize("model_type", WHOLE)
@torch.inference_mode()
def test_the_text_model_of_a_multimodal_model_equals_transformers(
    model_type: str, tmp_path: Path
) -> None:
    whole = make_whole(model_type, tmp_path)
    # Layers for multi-token prediction, which transformers does not save.
    mtp = {
        "mtp.layers.0.self_attn.q_proj.weight": torch.zeros(3, 5),
        "mtp.fc.weight": torch.ones(2),
    }
    rewrite(tmp_path, lambda tensors: {**tensors, **mtp})

    assert_served_as_by(whole, tmp_path)


SIGLIP = {**LAYERS, "model_type": "siglip_vision_model", "image_size": 28}
SCALED: dict[str, tuple[str, dict[str, Any], float]] = {
    "aya_vision": ("cohere2", {"logit_scale": 0.25, "sliding_window": 9}, 0.25),
    "cohere2_vision": ("cohere2", {"logit_scale": 0.25, "initializer_range": 0.3}, 0.25),
    "llava_next": ("granite", {"logits_scaling": 2.0, "initializer_range": 0.3}, 0.5),
}
"""Multimodal model_type -> model_type and fields of its text model, and the factor of its
logits."""


@pytest.mark.parametrize("model_type", SCALED)
@torch.inference_mode()
def test_logits_of_a_whole_model_have_the_scale_of_its_text_model(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aya Vision, Command A Vision and Granite Vision.

    The wrappers of transformers apply lm_head without the factor of Cohere2ForCausalLM and
    GraniteForCausalLM. The factor is right: the published tensors under language_model. form a
    causal model with its head, and vLLM computes the logits with the class of the text model.
    Granite4VisionForConditionalGeneration of transformers divides by logits_scaling too. Greedy
    answers are equal with and without the factor; sampling and log-probabilities differ.
    """
    text_type, text, factor = SCALED[model_type]
    monkeypatch.setitem(WHOLE, model_type, (text_type, text, SIGLIP))
    whole = make_whole(model_type, tmp_path)
    prompts = random_prompts(1, 40)

    found = greedy_by_pages(load_decoder(tmp_path), prompts, NEW_TOKENS)

    unscaled = [(tokens, logits / factor) for tokens, logits in found]
    assert_same_as_transformers(unscaled, prompts, whole, TOLERANCE)


@torch.inference_mode()
def test_a_text_model_saved_from_a_multimodal_checkpoint_is_served(tmp_path: Path) -> None:
    """Training loads a Qwen3.5 as a text model, and transformers keeps the names of the multimodal
    checkpoint."""
    whole, saved = tmp_path / "whole", tmp_path / "saved"
    make_whole("qwen3_5", whole)
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(saved)
    assert "model.language_model.norm.weight" in load_file(saved / "model.safetensors")

    assert_served_as_by(load_reference(saved), saved)


@torch.inference_mode()
def test_ernie_vl_is_served_as_published(tmp_path: Path) -> None:
    """The text model's fields are at the top level, and some list a value for text and a value for
    images."""
    whole = make_whole("ernie4_5_vl_moe", tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    text = fields.pop("text_config")
    for name in ("model_type", "mlp_layer_types"):
        del text[name]
    lists = {"moe_num_experts": [4, 4], "moe_layer_start_index": [1, 1]}
    lists |= {"moe_layer_end_index": [1, 1]}
    del fields["image_token_id"]
    file.write_text(json.dumps({**text, **fields, **lists, "moe_layer_interval": 1}))

    assert_served_as_by(whole, tmp_path)


BODIES = {
    "DeepseekVLV2ForCausalLM": "language.",
    "Qwen2_5OmniModel": "thinker.",
    "Qwen3OmniMoeForConditionalGeneration": "thinker.",
    "Ovis": "llm.",
    "Ovis2_5": "llm.",
}
"""Architecture -> prefix of its language model, if the prefix is not language_model."""
INSIDE_MODEL = ("Granite4VisionForConditionalGeneration", "InternS1ForConditionalGeneration")
"""Architectures whose language model is model.language_model, with lm_head beside model."""


def _published_name(architecture: str, name: str) -> str:
    """The name of a language model's tensor `name` in a checkpoint of `architecture`."""
    if architecture in INSIDE_MODEL:
        return name.replace("model.", "model.language_model.", 1)
    return BODIES.get(architecture, "language_model.") + name


@pytest.mark.parametrize(
    ("architecture", "family", "name", "text_type"),
    [
        ("KimiK25ForConditionalGeneration", "deepseek_v3", "text_config", "kimi_k2"),
        ("KimiVLForConditionalGeneration", "deepseek_v3", "text_config", "deepseek_v3"),
        ("InternVLChatModel", "qwen2", "llm_config", "qwen2"),
        ("InternVLChatModel", "llama", "llm_config", "llama"),
        ("InternVLChatModel", "phi3", "llm_config", "phi3"),
        ("InternS1ForConditionalGeneration", "qwen3_moe", "text_config", "qwen3_moe"),
        (
            "Granite4VisionForConditionalGeneration",
            "granite",
            "text_config",
            "granite4_vision_text",
        ),
        ("DeepseekVLV2ForCausalLM", "deepseek_v2", "language_config", "deepseek_v2"),
        ("Ovis", "qwen2", "llm_config", "qwen2"),
        ("Qwen2AudioForConditionalGeneration", "qwen2", "text_config", "qwen2"),
        ("VoxtralForConditionalGeneration", "llama", "text_config", "llama"),
        ("Qwen2_5OmniModel", "qwen2", "thinker_config", "qwen2_5_omni_text"),
        (
            "Qwen3OmniMoeForConditionalGeneration",
            "qwen3_moe",
            "thinker_config",
            "qwen3_omni_moe_text",
        ),
        ("Ovis2_5", "qwen3", "llm_config", "qwen3"),
    ],
)
@torch.inference_mode()
def test_the_text_model_of_a_multimodal_checkpoint_is_served(
    architecture: str, family: str, name: str, text_type: str, tmp_path: Path
) -> None:
    make_tiny(family, tmp_path)
    reference = load_reference(tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: {
            "vision_tower.weight": torch.zeros(3),
            **{_published_name(architecture, name): tensor for name, tensor in tensors.items()},
        },
    )
    file = tmp_path / "config.json"
    text = {**json.loads(file.read_text()), "model_type": text_type}
    if name == "thinker_config":
        text = {"text_config": text, "vision_config": {}, "audio_config": {}}
    whole = {"architectures": [architecture], "vision_config": {}, name: text}
    tokens = {"media_placeholder_token_id": IMAGE, "image_token_id": IMAGE}
    file.write_text(json.dumps({**whole, **tokens}))

    assert read_model_config(str(tmp_path)).vision is None
    assert_served_as_by(reference, tmp_path)


@torch.inference_mode()
def test_paddleocr_vl_is_served_as_published(tmp_path: Path) -> None:
    """The text model's fields are at the top level."""
    whole = make_whole("paddleocr_vl", tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    text = fields.pop("text_config")
    text["rope_scaling"] = {"type": "default", **text.pop("rope_parameters")}
    file.write_text(json.dumps({**text, **fields}))

    assert_served_as_by(whole, tmp_path)


@torch.inference_mode()
def test_deepseek_vl2_with_the_router_of_v3_is_served(tmp_path: Path) -> None:
    """The largest DeepSeek-VL2 is a deepseek_v2 with the router of DeepSeek-V3."""
    make_tiny("deepseek_v3", tmp_path)
    reference = load_reference(tmp_path)
    rewrite(tmp_path, lambda tensors: {f"language.{name}": tensors[name] for name in tensors})
    file = tmp_path / "config.json"
    text = json.loads(file.read_text())
    text |= {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    text |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    file.write_text(json.dumps({"model_type": "deepseek_vl_v2", "language_config": text}))

    assert_served_as_by(reference, tmp_path)


OF_TEXT = ("lm_head.", "model.embed_tokens.", "model.norm.", "model.layers.")


def write_deepseek_published(folder: Path, *, prefix: str = "", **fields: Any) -> Any:
    """Write a DeepSeek without MLA, with `fields` in config.json and language_config as published,
    and `prefix` before names of the text model. Returns the model of transformers."""
    whole = make_whole("deepseek_ocr2", folder)
    rewrite(
        folder,
        lambda tensors: {
            f"{prefix}{name}"
            if name.startswith(OF_TEXT)
            else name.removeprefix(prefix and "model."): tensor
            for name, tensor in tensors.items()
        },
    )
    file = folder / "config.json"
    text = json.loads(file.read_text())["text_config"]
    for name in ("mlp_layer_types", "rope_parameters", "rms_norm_eps", "head_dim"):
        del text[name]
    text |= {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    text |= {"use_mla": False, "kv_lora_rank": None, "q_lora_rank": None}
    text |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0)
    text |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    file.write_text(json.dumps({"model_type": "deepseek_vl_v2", "language_config": text, **fields}))
    return whole


@pytest.mark.parametrize(
    ("prefix", "fields"),
    [
        ("language.", {}),
        # The published file repeats the fields of language_config.
        ("", {"architectures": ["DeepseekOCRForCausalLM"], "hidden_size": 64, "vision_config": {}}),
        ("", {"architectures": ["DeepseekOCR2ForCausalLM"]}),
    ],
    ids=["DeepSeek-VL2-Tiny", "DeepSeek-OCR", "DeepSeek-OCR-2"],
)
@torch.inference_mode()
def test_deepseek_without_mla_is_served_as_published(
    prefix: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """These models use the attention of the first DeepSeek MoE."""
    whole = write_deepseek_published(tmp_path, prefix=prefix, **fields)

    assert read_model_config(str(tmp_path)).vision is None
    assert_served_as_by(whole, tmp_path)


@torch.inference_mode()
def test_the_first_deepseek_moe_is_served_as_published(tmp_path: Path) -> None:
    """The config has no use_mla and no other MLA field."""
    whole = write_deepseek_published(tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: {
            name: tensor for name, tensor in tensors.items() if name.startswith(OF_TEXT)
        },
    )
    file = tmp_path / "config.json"
    text = json.loads(file.read_text())["language_config"]
    for name in ("use_mla", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "topk_method"):
        del text[name]
    file.write_text(json.dumps({**text, "architectures": ["DeepseekForCausalLM"]}))

    assert_served_as_by(whole, tmp_path)


@torch.inference_mode()
def test_deepseek_vl2_without_architectures_is_served(tmp_path: Path) -> None:
    """The published files have a model_type instead of architectures, and omit default values of
    the language model."""
    make_tiny("deepseek_v2", tmp_path, rms_norm_eps=1e-6)
    reference = load_reference(tmp_path)
    rewrite(tmp_path, lambda tensors: {f"language.{name}": tensors[name] for name in tensors})
    file = tmp_path / "config.json"
    text = json.loads(file.read_text())
    for name in ("rms_norm_eps", "rope_parameters", "hidden_act", "attention_bias", "head_dim"):
        del text[name]
    file.write_text(json.dumps({"model_type": "deepseek_vl_v2", "language_config": text}))

    assert_served_as_by(reference, tmp_path)


@torch.inference_mode()
def test_an_architecture_inside_text_config_is_read(tmp_path: Path) -> None:
    """transformers 4.57 saves Qwen2-VL and Qwen2.5-VL in this form."""
    make_tiny("qwen2", tmp_path)
    reference = load_reference(tmp_path)
    file = tmp_path / "config.json"
    text = json.loads(file.read_text())
    text |= {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl_text",
    }
    file.write_text(json.dumps({"model_type": "qwen2_5_vl", "text_config": text}))

    assert_served_as_by(reference, tmp_path)


def stacked(tensors: dict[str, Tensor], block: str, num_experts: int) -> dict[str, Tensor]:
    """`tensors` with the experts of each layer stacked as (experts, out, in)."""
    prefixes = {name.partition(".experts.")[0] for name in tensors if f"{block}.experts." in name}
    rest = {name: tensor for name, tensor in tensors.items() if f"{block}.experts." not in name}
    for prefix in prefixes:
        gates, ups, downs = (
            [tensors[f"{prefix}.experts.{i}.{kind}_proj.weight"] for i in range(num_experts)]
            for kind in ("gate", "up", "down")
        )
        pairs = zip(gates, ups, strict=True)
        rest[f"{prefix}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        rest[f"{prefix}.experts.down_proj"] = torch.stack(downs)
    return rest


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "deepseek_v3"])
@torch.inference_mode()
def test_stacked_experts_are_served_as_by_transformers(family: str, tmp_path: Path) -> None:
    """Qwen3.5 is published with stacked experts. Other families are stacked if transformers 5
    saves the tensors as it holds them in memory."""
    make_tiny(family, tmp_path)
    reference = load_reference(tmp_path)
    num_experts = {"deepseek_v3": 8}.get(family, 4)
    rewrite(tmp_path, lambda tensors: stacked(tensors, "mlp", num_experts))

    assert_served_as_by(reference, tmp_path)


@torch.inference_mode()
def test_llama4_scout_is_served_as_first_published(tmp_path: Path) -> None:
    """Both RoPE frequency factors are 1, and attn_temperature_tuning is a number."""
    rope = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    rope |= {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
    make_tiny("llama4_text", tmp_path, rope_parameters=rope)
    reference = load_reference(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attn_temperature_tuning": 4}))

    assert_served_as_by(reference, tmp_path)


@torch.inference_mode()
def test_llama4_with_separate_expert_tensors_is_served(tmp_path: Path) -> None:
    """Quantization tools write the experts as separate tensors."""

    def separated(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            prefix, dot, kind = name.partition(".experts.")
            if not dot:
                found[name] = tensor
                continue
            for expert, own in enumerate(tensor.mT):
                names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
                for part, piece in zip(names, own.chunk(len(names)), strict=True):
                    found[f"{prefix}.experts.{expert}.{part}.weight"] = piece.contiguous()
        return found

    make_tiny("llama4_text", tmp_path)
    reference = load_reference(tmp_path)
    rewrite(tmp_path, separated)

    assert_served_as_by(reference, tmp_path)


@torch.inference_mode()
def test_phi_moe_is_served_as_published(tmp_path: Path) -> None:
    """The published config spells the class name differently."""
    make_tiny("phimoe", tmp_path)
    reference = load_reference(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "architectures": ["PhiMoEForCausalLM"]}))

    assert_served_as_by(reference, tmp_path)


@torch.inference_mode()
def test_minimax_m3_in_mxfp8_is_served_as_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key and query projections of the indexer are quantized; the vision tower is not."""
    sizes = {"intermediate_size": 64, "dense_intermediate_size": 96, "shared_intermediate_size": 32}
    text_type, text, vision = WHOLE["minimax_m3_vl"]
    monkeypatch.setitem(WHOLE, "minimax_m3_vl", (text_type, {**text, **sizes}, vision))
    make_whole("minimax_m3_vl", tmp_path / "whole")
    parts = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")
    quantized = quantize(FORMATS["mxfp8"], tmp_path / "whole", tmp_path / "quantized", other=parts)
    file = quantized.folder / "config.json"
    fields = json.loads(file.read_text())
    gates = [f"language_model.model.layers.{layer}.block_sparse_moe.gate" for layer in (1, 2)]
    ignored = [*gates, "lm_head", "model.embed_tokens", "vision_tower", "patch_merge_mlp"]
    ignored += ["multi_modal_projector"]
    # transformers dequantizes with this option.
    fields["quantization_config"] |= {"ignored_layers": ignored, "dequantize": True}
    file.write_text(json.dumps(fields))
    stored = load_file(quantized.folder / "model.safetensors")
    index = "language_model.model.layers.1.self_attn.index_q_proj.weight_scale_inv"
    assert stored[index].dtype == torch.uint8

    whole = AutoModelForImageTextToText.from_pretrained(
        quantized.folder, dtype=torch.float32, attn_implementation="eager"
    )

    assert_served_as_by(whole, quantized.folder)
