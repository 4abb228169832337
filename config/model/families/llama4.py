"""Llama 4, text only: one routed expert and a shared one for each token."""

from collections.abc import Mapping

from config.model.decoder_spec import DecoderSpec, Family, MoESpec, uniform_layers
from config.model.model_config import ModelConfig
from config.model.moe import MoEFields

BLOCK = "feed_forward"


def _llama4(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        layers=uniform_layers(config),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp=BLOCK,
        moe=MoESpec(
            scoring="sigmoid",
            scales_input=True,
            block=BLOCK,
            gate="router",
            shared="shared_expert",
            layout="transposed",
        ),
    )


FAMILIES: Mapping[str, Family] = {
    "Llama4ForCausalLM": Family(
        _llama4,
        "Llama 4 Scout, Maverick",
        "text only",
        defaults={"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "num_experts_per_tok": 1},
        moe=MoEFields(
            "num_local_experts",
            dense_size="intermediate_size_mlp",
            shared_size="intermediate_size",
            # Not in these files, so the scores are not renormalized.
            renormalize="norm_topk_prob",
            layer_step="interleave_moe_layer_step",
            expert_layers="moe_layers",
        ),
    ),
}
