"""gpt-oss: experts with biases and a clamped SwiGLU, in bfloat16 or MXFP4."""

from collections.abc import Mapping

from config.errors import ConfigError
from config.model.decoder_spec import (
    MXFP4_BLOCK,
    ClampedSwiGLU,
    DecoderSpec,
    Family,
    MoESpec,
    uniform_layers,
)
from config.model.model_config import ModelConfig
from config.model.moe import MoEFields


def _gpt_oss(config: ModelConfig) -> DecoderSpec:
    is_packed = config.is_quantized and config.quantization is None
    if is_packed:
        _check_blocks(config)
    return DecoderSpec(
        layers=tuple(layer._replace(sinks=True) for layer in uniform_layers(config)),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        moe=MoESpec(
            # A softmax over the selected experts equals a renormalized softmax over all experts.
            scoring="softmax",
            gate="router",
            router_bias=True,
            expert_bias=True,
            clamped_swiglu=ClampedSwiGLU(
                config.fields.number("swiglu_alpha", 1.702),
                config.fields.number("swiglu_limit", 7.0, above=0.0),
            ),
            layout="mxfp4" if is_packed else "transposed",
        ),
    )


def _check_blocks(config: ModelConfig) -> None:
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(config, name)
        if size % MXFP4_BLOCK:
            raise ConfigError(
                f"{name} in {config.fields.file} is {size}, MXFP4 needs a multiple of {MXFP4_BLOCK}"
            )


FAMILIES: Mapping[str, Family] = {
    "GptOssForCausalLM": Family(
        _gpt_oss,
        "gpt-oss-20b, gpt-oss-120b",
        defaults={
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            # Every second layer uses full attention.
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
        moe=MoEFields("num_local_experts"),
        quantizations=("mxfp4",),
    ),
}
