"""Names of operations in config.json, checked before weights are downloaded or read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from config.errors import ConfigError
from config.model.json_fields import shown
from config.model.model_config import ModelConfig

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"]

HIDDEN_ACTS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Supported values of hidden_act -> the name of the activation function."""
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""Supported values of rope_type."""


def check_operations(model_config: ModelConfig) -> None:
    """Raise ConfigError for an activation or a rope type that built-in models do not support."""
    ropes = (
        [model_config.rope]
        if model_config.local_rope is None
        else [model_config.rope, model_config.local_rope]
    )
    scalings = [rope.scaling for rope in ropes]
    kinds = ["default" if scaling is None else scaling.kind for scaling in scalings]
    for field, value, known in (
        ("hidden_act", model_config.hidden_act, HIDDEN_ACTS),
        *(("rope_type", kind, ROPE_TYPES) for kind in kinds),
    ):
        if value not in known:
            raise ConfigError(
                f"{field} in {Path(model_config.path, 'config.json')} is {shown(value)}, it must "
                f"be one of {', '.join(known)}"
            )
