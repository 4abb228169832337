"""Names of architectures, and how the config.json of a family differs from what is read of others:
fields under other names, and values that are assumed where a field is absent."""

from collections.abc import Mapping

from config.errors import ConfigError
from config.model.json_fields import Fields, Json, shown

OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "dff"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}
"""The usual name -> those of GPT-2, Falcon, OPT and their like."""

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


def with_usual_names(fields: Fields) -> Fields:
    """`fields` with every field under its usual name too. ConfigError where two names of the number
    of layers disagree: code of transformers may read the other one."""
    raw = dict(fields.raw)
    for usual, others in OTHER_NAMES.items():
        found = [raw[name] for name in (usual, *others) if raw.get(name) is not None]
        if found:
            raw[usual] = found[0]
        if usual == "num_hidden_layers" and found and found[-1] != found[0]:
            raise ConfigError(
                f"{fields.file} says {shown(found[0])} and {shown(found[-1])} layers, under two "
                "names"
            )
    if "n_inner" in raw and raw.get("intermediate_size") is None:
        # GPT-2 has null for four times the hidden size.
        raw["intermediate_size"] = 4 * fields.count("n_embd")
    return Fields(raw, fields.file)
