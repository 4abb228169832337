"""Names of architectures, and how the config.json of a family differs from what is read of others:
fields under other names, and values that are assumed where a field is absent."""

from collections.abc import Mapping

from config.model.json_fields import Fields, Json

HEADLESS_ENDINGS = ("Model", "ForSequenceClassification")
"""Of the decoder families without an output head."""

RENAMED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Qwen2MoeForCausalLM": {"qkv_bias": ("attention_bias",)},
    # As transformers 5 saves it.
    "Qwen3MoeForCausalLM": {"num_local_experts": ("num_experts",)},
}
"""By architecture: a field, and the names under which it is read."""

DEFAULTS: Mapping[str, Json] = {
    "Qwen2MoeForCausalLM": {"attention_bias": True},
    "Glm4MoeForCausalLM": {
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "Ernie4_5_MoeForCausalLM": {
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "MiniMaxM2ForCausalLM": {"rope_theta": 5000000.0},
}
"""By architecture: values of absent fields, where they differ from those of most families."""


def causal_name(architecture: str) -> str:
    """The name that the family has with an output head."""
    for ending in HEADLESS_ENDINGS:
        if architecture.endswith(ending):
            return f"{architecture.removesuffix(ending)}ForCausalLM"
    return architecture


def family_fields(architecture: str, fields: Fields) -> Fields:
    """`fields` with the names and values that are read of all families."""
    name = causal_name(architecture)
    present = {key: value for key, value in fields.raw.items() if value is not None}
    for theirs, ours in RENAMED.get(name, {}).items():
        if theirs in present:
            present = {**dict.fromkeys(ours, present[theirs]), **present}
    return Fields({**DEFAULTS.get(name, {}), **present}, fields.file)
