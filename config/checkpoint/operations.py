"""Names in config.json that choose an operation, checked before weights are downloaded or read."""

from pathlib import Path

from config.errors import ConfigError
from config.model.json_fields import shown
from config.model.model_config import ModelConfig

ACTIVATIONS = (
    "silu",
    "swish",
    "gelu",
    "gelu_new",
    "gelu_fast",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "relu",
    "relu2",
)
"""Values of hidden_act that hpu/layers/mlp.py has functions for."""
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""Values of rope_type that hpu/ops/rope.py has frequencies for."""


def check_operations(facts: ModelConfig) -> None:
    """Raise ConfigError for an activation or a rope type that the models that are built in do not
    have."""
    ropes = [facts.rope] if facts.local_rope is None else [facts.rope, facts.local_rope]
    scalings = [rope.scaling for rope in ropes]
    kinds = ["default" if scaling is None else scaling.kind for scaling in scalings]
    for field, value, known in (
        ("hidden_act", facts.hidden_act, ACTIVATIONS),
        *(("rope_type", kind, ROPE_TYPES) for kind in kinds),
    ):
        if value not in known:
            raise ConfigError(
                f"{field} in {Path(facts.path, 'config.json')} is {shown(value)}, it must be one "
                f"of {', '.join(known)}"
            )
