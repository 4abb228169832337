"""The text model of checkpoints with images or audio, compared with transformers in float32."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import assert_same_as_transformers, greedy_by_pages, load_reference
from paged_harness import load_decoder, load_transformers_model
from releases import transformers_before
from safetensors.torch import load_file, save_file
from tiny_models import EOS, make_tiny, write_tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from config.checkpoint.facts import model_facts
from config.errors import ConfigError
from config.model.architectures import ARCHITECTURES
from config.model.read_config import read_model_config
from hpu.model_loader.size_estimate import count_parameters
from hpu.models.base import LoadableModel

if transformers_before("5.18"):
    pytest.skip("needs the interfaces of transformers 5.18", allow_module_level=True)

NEW_TOKENS, TOLERANCE = 32, 1e-3
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA3: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 9,
    "layer_types": [SLIDING, FULL],
    "query_pre_attn_scalar": 16,
    "initializer_range": 0.3,
    # With tied embeddings, a model this small repeats its last token.
    "tie_word_embeddings": False,
}
SHARED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": [SLIDING, FULL] * 2,
    "sliding_window": 9,
    "head_dim": 16,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 16,
}
GEMMA3N: dict[str, Any] = {
    **SHARED,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}
LLAMA4: dict[str, Any] = {
    "attention_chunk_size": 7,
    "no_rope_layers": [1, 0],
    "interleave_moe_layer_step": 1,
    "moe_layers": [0, 1],
    "num_local_experts": 4,
    "intermediate_size_mlp": 128,
    "head_dim": 16,
    "floor_scale": 8,
    "attn_scale": 0.5,
}
OLD, NEW = (
    ("language_model.model.", "language_model.lm_head."),
    ("model.language_model.", "lm_head."),
)
"""Prefixes of the body and of the head."""
WHOLE: dict[str, tuple[str, dict[str, Any], tuple[str, str]]] = {
    "Gemma3ForConditionalGeneration": ("gemma3_text", GEMMA3, OLD),
    "Gemma3nForConditionalGeneration": ("gemma3n_text", GEMMA3N, NEW),
    "Gemma4ForConditionalGeneration": (
        "gemma4_text",
        {**SHARED, "global_head_dim": 32, "tie_word_embeddings": False},
        NEW,
    ),
    "Llama4ForConditionalGeneration": ("llama4_text", LLAMA4, OLD),
    "LlavaForConditionalGeneration": ("qwen2", {}, NEW),
    "Mistral3ForConditionalGeneration": ("mistral", {"head_dim": 24, "sliding_window": None}, OLD),
}


def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    return [torch.randint(4, 320, (length,), generator=random).tolist() for length in (1, 23, 40)]


def load(folder: Path) -> LoadableModel:
    if read_model_config(str(folder)).architecture in ARCHITECTURES:
        return load_decoder(folder)
    return load_transformers_model(folder)


def wrap(folder: Path, architecture: str, body: str, head: str) -> None:
    """Turn the checkpoint of a text model into a multimodal checkpoint that contains it."""
    file = folder / "model.safetensors"
    tensors = {
        name.replace("model.", body, 1) if name.startswith("model.") else head + name[8:]: tensor
        for name, tensor in load_file(file).items()
    }
    tensors["vision_tower.layers.0.weight"] = torch.zeros(3, 5)
    tensors["multi_modal_projector.linear.weight"] = torch.zeros(7)
    save_file(tensors, file, metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    del text["architectures"]
    whole = {
        "architectures": [architecture],
        "dtype": text.pop("dtype"),
        "tie_word_embeddings": text.pop("tie_word_embeddings", True),
        "eos_token_id": [7, 9],
        "text_config": text,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "generation_config.json").unlink()


@pytest.mark.parametrize("name", WHOLE)
@torch.inference_mode()
def test_the_text_model_of_a_multimodal_model_gives_the_tokens_of_a_text_model(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, overrides, prefixes = WHOLE[name]
    folder = make_tiny(family, tmp_path, **overrides)
    reference = load_reference(folder)
    wrap(folder, name, *prefixes)

    with caplog.at_level(logging.INFO):
        model = load(folder)
    found = greedy_by_pages(model, prompts(), NEW_TOKENS)

    assert_same_as_transformers(found, prompts(), reference, TOLERANCE)
    (line,) = [text for text in caplog.messages if "not the text model's" in text]
    assert line.startswith("2 tensors in") and line.endswith(
        "images, audio and video are not served"
    )
    assert read_model_config(str(folder)).eos_token_ids == (7, 9, EOS)
    sizes = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(model_facts(str(folder))) == sizes


@torch.inference_mode()
def test_the_text_model_of_a_checkpoint_saved_with_its_tower_equals_transformers(
    tmp_path: Path,
) -> None:
    text = json.loads((make_tiny("gemma3_text", tmp_path, **GEMMA3) / "config.json").read_text())
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = AutoConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=319,
        boi_token_index=318,
        eoi_token_index=317,
    )
    torch.manual_seed(2)
    whole = AutoModelForImageTextToText.from_config(config).float().eval()  # type: ignore[no-untyped-call]  # theirs
    whole.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    prompt = list(range(10, 40))
    expected = whole(input_ids=torch.tensor([prompt])).logits[0]

    ((_, found),) = greedy_by_pages(load_decoder(tmp_path), [prompt], 1)

    assert (found - expected).abs().max() < TOLERANCE


def test_the_error_names_an_unknown_text_model(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    wrap(folder, "LlavaForConditionalGeneration", *NEW)
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    fields["text_config"]["model_type"] = "own"
    file.write_text(json.dumps(fields))

    with pytest.raises(ConfigError, match=r"has the model_type 'own', .* for a LlavaForCond"):
        read_model_config(str(folder))


def test_an_unexpected_tensor_of_the_text_model_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    wrap(folder, "LlavaForConditionalGeneration", *NEW)
    file = folder / "model.safetensors"
    save_file({**load_file(file), "model.language_model.extra": torch.zeros(2)}, file)

    with pytest.raises(ConfigError, match=r"does not have model.extra in model.safetensors"):
        load_decoder(folder)
