"""Builds a whole vision-language model of transformers without weights, and reduces it to its
vision tower."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from config.checkpoint.weight_maps.text_part import UNLOADED
from config.model.json_fields import read_json
from config.model.model_config import ModelConfig
from config.model.multimodal.vision import VisionFacts
from hpu.models.transformers_fallback import empty_model

LANGUAGE_MODELS = (
    *("language_model", "text_model", "lm_head"),
    *("layers", "embed_tokens", "norm", "rotary_emb"),
)
"""Attributes of the language model, which are removed. `layers` to `rotary_emb` are its parts in
models whose tower is inside the language model."""


def build_whole(config: ModelConfig, facts: VisionFacts, dtype: torch.dtype) -> Any:
    """PreTrainedModel on the meta device. Raises ConfigError if transformers cannot build the
    model."""
    file = Path(config.path, "config.json")
    fields = dict(read_json(file))
    # Towers are not quantized.
    fields.pop("quantization_config", None)
    fields.pop("compression_config", None)
    return empty_model(
        lambda: getattr(transformers, facts.architecture),
        fields,
        {"dtype": dtype},
        named=f"{config.path} is a {facts.architecture},",
        file=file,
    )


def drop_language_model(whole: Any) -> None:
    """Remove the language model, and modules that produce neither text nor image embeddings."""
    for parent in (whole, getattr(whole, "model", None)):
        for name in LANGUAGE_MODELS:
            if parent is not None and isinstance(getattr(parent, name, None), nn.Module):
                setattr(parent, name, None)
    modules = dict(whole.named_modules())
    for path in UNLOADED:
        parent, _, name = path.rpartition(".")
        if path in modules:
            setattr(modules[parent], name, None)


def features_owner(whole: Any) -> Any:
    """Module whose `get_image_features` computes image embeddings: the model without its head, else
    the model with its head. None if both lack the method."""
    for owner in (getattr(whole, "model", None), whole):
        if hasattr(owner, "get_image_features"):
            return owner
    return None
