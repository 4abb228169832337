"""Names in config.json that choose an operation, checked before weights are downloaded or read."""

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
"""Values of hidden_act -> the name of the activation function."""
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""Values of rope_type."""


def check_operations(facts: ModelConfig) -> None:
    """Raise ConfigError for an activation or a rope type that built-in models do not support."""
    ropes = [facts.rope] if facts.local_rope is None else [facts.rope, facts.local_rope]
    scalings = [rope.scaling for rope in ropes]
    kinds = ["default" if scaling is None else scaling.kind for scaling in scalings]
    for field, value, known in (
        ("hidden_act", facts.hidden_act, HIDDEN_ACTS),
        *(("rope_type", kind, ROPE_TYPES) for kind in kinds),
    ):
        if value not in known:
            raise ConfigError(
                f"{field} in {Path(facts.path, 'config.json')} is {shown(value)}, it must be one "
                f"of {', '.join(known)}"
            )
