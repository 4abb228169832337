"""Llama 4: chunked attention in layers with rope, full attention in layers without rope, and a
shared expert in addition to the routed experts."""

from collections.abc import Mapping

from config.model.decoder_spec import (
    DecoderSpec,
    Family,
    MoESpec,
    TemperatureTuning,
    uniform_layers,
)
from config.model.model_config import ModelConfig
from config.model.moe import MoEFields

BLOCK = "feed_forward"


def _llama4(config: ModelConfig) -> DecoderSpec:
    """Layers with rope use chunked attention. Layers without rope use full attention, and scale
    queries by position unless attn_temperature_tuning is false or 0; the first checkpoints have 4
    for true."""
    fields = config.fields
    tunes = fields.raw.get("attn_temperature_tuning")
    if not isinstance(tunes, int):
        tunes = fields.get("attn_temperature_tuning", bool, True)
    return DecoderSpec(
        layers=tuple(
            layer._replace(
                qk_norm=layer.rope != "none", tunes_temperature=bool(tunes) and layer.rope == "none"
            )
            for layer in uniform_layers(config)
        ),
        interleaved_rope=True,
        qk_norm="unweighted" if fields.get("use_qk_norm", bool, True) else "none",
        qk_norm_after_rope=True,
        temperature=TemperatureTuning(
            fields.number("attn_scale", 0.1), fields.number("floor_scale", 8192.0, above=0.0), 1
        ),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp=BLOCK,
        moe=MoESpec(
            scoring="sigmoid",
            scales_input=True,
            block=BLOCK,
            gate="router",
            shared="shared_expert",
            layout="transposed" if _stacks_experts(config) else "separate",
        ),
    )


def _stacks_experts(config: ModelConfig) -> bool:
    """Whether the checkpoint stacks the experts. Quantized experts are stored separately, except by
    fbgemm_fp8."""
    quantization = config.quantization
    if quantization is None or quantization.stacked is not None:
        return True
    expert = f"model.layers.{config.num_layers - 1}.{BLOCK}.experts.0.gate_proj"
    return quantization.scheme_of(expert) is None


FAMILIES: Mapping[str, Family] = {
    "Llama4ForCausalLM": Family(
        _llama4,
        "Llama 4 Scout, Maverick",
        "",
        defaults={
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8192,
            "no_rope_layer_interval": 4,
        },
        moe=MoEFields(
            "num_local_experts",
            dense_size="intermediate_size_mlp",
            shared_size="intermediate_size",
            # The files lack this field, so the scores are not renormalized.
            renormalize="norm_topk_prob",
            layer_step="interleave_moe_layer_step",
            expert_layers="moe_layers",
        ),
    ),
}
