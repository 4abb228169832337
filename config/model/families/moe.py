"""MoE families based on Llama."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from config.model.decoder_spec import DecoderSpec, Family, MoESpec, uniform_layers
from config.model.families.dense import QWEN_WINDOWS, granite, qwen3
from config.model.json_fields import Fields
from config.model.model_config import ModelConfig
from config.model.moe import MAX_EXPERTS, MoEFields


def _mixtral(config: ModelConfig) -> DecoderSpec:
    moe = MoESpec(block="block_sparse_moe", projections=("w1", "w3", "w2"))
    return DecoderSpec(layers=uniform_layers(config), moe=moe)


def _qwen2_moe(config: ModelConfig) -> DecoderSpec:
    """Qwen1.5-MoE and Qwen2-MoE."""
    moe = MoESpec(shared="shared_expert", shared_gate="shared_expert_gate")
    return DecoderSpec(layers=uniform_layers(config), qkv_bias=config.attention_bias, moe=moe)


def _qwen3_moe(config: ModelConfig) -> DecoderSpec:
    return replace(qwen3(config), moe=MoESpec())


def _olmoe(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        layers=uniform_layers(config),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_out_bias,
        qk_norm="all",
        moe=MoESpec(),
    )


GRANITE_MOE = MoESpec(block="block_sparse_moe", gate="router.layer", layout="merged")


def _granite_moe(config: ModelConfig) -> DecoderSpec:
    return replace(granite(config), mlp_bias=False, moe=GRANITE_MOE)


def _glm4_moe(config: ModelConfig) -> DecoderSpec:
    """GLM 4.5 to 4.7."""
    return DecoderSpec(
        layers=uniform_layers(config),
        qkv_bias=config.attention_bias,
        qk_norm="heads" if config.use_qk_norm else "none",
        moe=MoESpec(
            scoring="sigmoid",
            float32_router=True,
            correction_bias="gate.e_score_correction_bias",
            shared="shared_experts",
        ),
    )


def _aria(config: ModelConfig) -> DecoderSpec:
    """The text model of Aria."""
    return DecoderSpec(
        layers=uniform_layers(config),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
        moe=MoESpec(
            gate="router",
            shared="shared_experts",
            layout="transposed",
            stacked=("fc1.weight", "fc2.weight"),
        ),
    )


def _ernie_moe(config: ModelConfig) -> DecoderSpec:
    """ERNIE 4.5 MoE, text only."""
    return DecoderSpec(
        layers=uniform_layers(config),
        interleaved_rope=True,
        moe=MoESpec(
            float32_router=True,
            correction_bias="moe_statics.e_score_correction_bias",
            correction_rows=(1,),
            shared="shared_experts",
        ),
    )


def _ernie_vl(config: ModelConfig) -> DecoderSpec:
    """The text model of ERNIE 4.5 VL. Image experts, which follow the text experts, and their
    router are not loaded."""
    spec, moe = _ernie_moe(config), config.moe
    assert spec.moe is not None and moe is not None
    first, prefix = moe.num_experts, f".{spec.moe.block}.experts"
    others = range(first, first + config.fields.count(_VISION_EXPERTS, maximum=MAX_EXPERTS))
    return replace(
        spec,
        moe=replace(spec.moe, correction_rows=(2,), transposed_router=True),
        unused=(
            f".{spec.moe.block}.gate.weight_1",
            *(
                f"{prefix}.{expert}.{projection}.weight"
                for expert in others
                for projection in spec.moe.projections
            ),
        ),
    )


def _ernie_vl_fields(fields: Fields) -> Mapping[str, Any]:
    """MoE fields of the text model, and the number of vision experts. Published files list a text
    value and an image value in each of these fields."""
    found: dict[str, Any] = {}
    for name in (
        *("moe_num_experts", "moe_intermediate_size"),
        *("moe_layer_start_index", "moe_layer_end_index"),
    ):
        value = fields.raw.get(name)
        found[name] = value[0] if isinstance(value, list) and value else value
    experts = fields.raw.get("moe_num_experts")
    found[_VISION_EXPERTS] = experts[-1] if isinstance(experts, list) and experts else experts
    return {**found, **listed_expert_layers(fields)}


def listed_expert_layers(fields: Fields) -> Mapping[str, Any]:
    """Compute moe_layers from mlp_layer_types, which transformers 5 saves for some families."""
    kinds = fields.get("mlp_layer_types", list, None)
    if kinds is None:
        return {}
    return {EXPERT_LAYERS: [index for index, kind in enumerate(kinds) if kind == "sparse"]}


def _minimax_m2(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        layers=uniform_layers(config),
        qk_norm="all",
        moe=MoESpec(
            scoring="sigmoid",
            float32_router=True,
            block="block_sparse_moe",
            correction_bias="e_score_correction_bias",
            projections=("w1", "w3", "w2"),
        ),
    )


QWEN_FIELDS = MoEFields(
    "num_experts",
    inner_size="moe_intermediate_size",
    renormalize="norm_topk_prob",
    layer_step="decoder_sparse_step",
    dense_layers="mlp_only_layers",
)
GLM_FIELDS = MoEFields(
    "n_routed_experts",
    inner_size="moe_intermediate_size",
    num_shared="n_shared_experts",
    renormalize="norm_topk_prob",
    num_groups="n_group",
    top_groups="topk_group",
    scaling_factor="routed_scaling_factor",
    first_layer="first_k_dense_replace",
)
EXPERT_LAYERS = "moe_layers"
"""Field with the indices of the layers with experts, which `listed_expert_layers` computes from
newer fields."""
_VISION_EXPERTS = "moe_num_vision_experts"
"""Field that `_ernie_vl_fields` computes."""
_ERNIE = MoEFields(
    "moe_num_experts",
    top_k="moe_k",
    inner_size="moe_intermediate_size",
    num_shared="moe_num_shared_experts",
    first_layer="moe_layer_start_index",
    last_layer="moe_layer_end_index",
    layer_step="moe_layer_interval",
)
_ERNIE_DEFAULTS = {
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}

FAMILIES: Mapping[str, Family] = {
    "MixtralForCausalLM": Family(
        _mixtral, "Mixtral 8x7B, 8x22B", moe=MoEFields("num_local_experts")
    ),
    "Qwen2MoeForCausalLM": Family(
        _qwen2_moe,
        "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        renamed={"qkv_bias": ("attention_bias",)},
        defaults={"attention_bias": True, **QWEN_WINDOWS},
        moe=QWEN_FIELDS._replace(shared_size="shared_expert_intermediate_size"),
    ),
    "Qwen3MoeForCausalLM": Family(
        _qwen3_moe,
        "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
        # transformers 5 saves this field.
        renamed={"num_local_experts": ("num_experts",)},
        defaults={"use_sliding_window": False},
        moe=QWEN_FIELDS,
    ),
    "OlmoeForCausalLM": Family(
        _olmoe,
        "OLMoE-1B-7B",
        moe=MoEFields("num_experts", renormalize="norm_topk_prob"),
    ),
    "GraniteMoeForCausalLM": Family(
        _granite_moe,
        "Granite 3 1B-A400M, 3B-A800M, PowerMoE",
        moe=MoEFields("num_local_experts"),
    ),
    "GraniteMoeSharedForCausalLM": Family(
        _granite_moe,
        "Granite with a shared expert",
        moe=MoEFields("num_local_experts", shared_size="shared_intermediate_size"),
    ),
    "Glm4MoeForCausalLM": Family(
        _glm4_moe,
        "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
        defaults={
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        moe=GLM_FIELDS,
    ),
    "AriaTextForCausalLM": Family(
        _aria,
        "Aria 25B-A3.9B (text)",
        defaults={"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 2},
        moe=MoEFields("moe_num_experts", top_k="moe_topk", num_shared="moe_num_shared_experts"),
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        _ernie_moe,
        "ERNIE-4.5-21B-A3B, 300B-A47B",
        "`use_bias` is refused",
        defaults=_ERNIE_DEFAULTS,
        moe=_ERNIE,
    ),
    "Ernie4_5_VLMoeTextForCausalLM": Family(
        _ernie_vl,
        "ERNIE-4.5-VL-28B-A3B, VL-424B-A47B (text)",
        "`use_bias` is refused",
        defaults=_ERNIE_DEFAULTS,
        moe=_ERNIE._replace(expert_layers=EXPERT_LAYERS),
        derive=_ernie_vl_fields,
    ),
    "MiniMaxM2ForCausalLM": Family(
        _minimax_m2,
        "MiniMax-M2",
        defaults={"rope_theta": 5000000.0},
        moe=MoEFields("num_local_experts"),
    ),
}
