"""Families whose checkpoints contain remote code: variants of Llama, mainly with other tensor names
and layouts. The remote code is never run."""

from collections.abc import Mapping
from dataclasses import replace

from config.errors import ConfigError
from config.json_text import Json
from config.model.decoder_spec import DecoderSpec, Family, uniform_layers, without_rope
from config.model.families.dense import llama
from config.model.json_fields import Fields
from config.model.model_config import DEFAULT_THETA, ModelConfig

_BAICHUAN2_VOCAB = 125696
"""Vocabulary size that distinguishes Baichuan 2 from the first Baichuan."""


def _internlm2(config: ModelConfig) -> DecoderSpec:
    return replace(
        llama(config),
        mlp_bias=False,
        qkv_layout="grouped",
        names={
            "model.embed_tokens": "model.tok_embeddings",
            "lm_head": "output",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.qkv_proj": "attention.wqkv",
            "self_attn.o_proj": "attention.wo",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
        },
    )


def _baichuan(config: ModelConfig) -> DecoderSpec:
    spec = DecoderSpec(
        layers=uniform_layers(config),
        qkv_layout="fused",
        names={"self_attn.qkv_proj": "self_attn.W_pack"},
        normalized_head=config.vocab_size == _BAICHUAN2_VOCAB,
    )
    if not config.fields.raw.get("alibi"):
        return spec
    layers = without_rope(spec.layers, (False,) * config.num_layers)
    return replace(spec, layers=layers, alibi_max_bias=8.0)


def _baichuan_fields(fields: Fields) -> Json:
    # Only the 7B models, which use rope, have max_position_embeddings. The 13B models use ALiBi.
    if fields.raw.get("max_position_embeddings") is not None:
        return {"alibi": False}
    return {"alibi": True, "max_position_embeddings": fields.count("model_max_length")}


def _chatglm(config: ModelConfig) -> DecoderSpec:
    return replace(
        llama(config),
        interleaved_rope=config.fields.get("original_rope", bool, True),
        qkv_layout="fused",
        fused_gate_up=True,
        names={
            "model.layers": "transformer.encoder.layers",
            "model.embed_tokens": "transformer.embedding.word_embeddings",
            "model.norm": "transformer.encoder.final_layernorm",
            "lm_head": "transformer.output_layer",
            "self_attn.qkv_proj": "self_attention.query_key_value",
            "self_attn.o_proj": "self_attention.dense",
            "mlp.gate_up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        unused=(".rotary_pos_emb.inv_freq",),
    )


_CHATGLM_SWITCHES = {
    # The first ChatGLM-6B has two-dimensional positions.
    "position_encoding_2d": False,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
}
"""The only supported value of each field."""


def _chatglm_fields(fields: Fields) -> Json:
    for name, value in _CHATGLM_SWITCHES.items():
        if fields.get(name, bool, value) is not value:
            raise ConfigError(f"{name} in {fields.file} must be {str(value).lower()}")
    if "vision_config" in fields.raw:
        raise ConfigError(
            f"{fields.file} has a vision_config: a ChatGLM with images (GLM-4V) is not supported"
        )
    has_bias = fields.get("add_bias_linear", bool, False)
    num_kv_heads = fields.count("num_attention_heads")
    if fields.get("multi_query_attention", bool, False):
        num_kv_heads = fields.count("multi_query_group_num", 1)
    return {
        # vocab_size may be the number of tokenizer tokens instead of embedding rows.
        "vocab_size": fields.count("padded_vocab_size", fields.raw.get("vocab_size")),
        "num_key_value_heads": num_kv_heads,
        "rope_theta": DEFAULT_THETA * fields.number("rope_ratio", 1.0, above=0.0),
        "attention_bias": has_bias or fields.get("add_qkv_bias", bool, False),
        "attention_out_bias": has_bias,
        "mlp_bias": has_bias,
    }


_BAICHUAN = Family(_baichuan, "Baichuan 7B and 13B, Baichuan 2 7B and 13B", derive=_baichuan_fields)

FAMILIES: Mapping[str, Family] = {
    "InternLM2ForCausalLM": Family(
        _internlm2, "InternLM2, InternLM2.5", renamed={"bias": ("attention_bias",)}
    ),
    "InternLM3ForCausalLM": Family(
        llama,
        "InternLM3",
        renamed={"qkv_bias": ("attention_bias",), "bias": ("attention_out_bias", "mlp_bias")},
        # transformers 5 saves the other two names.
        derive=lambda fields: {
            "attention_out_bias": fields.get(
                "attention_out_bias", bool, fields.get("mlp_bias", bool, False)
            )
        },
    ),
    "BaichuanForCausalLM": _BAICHUAN,
    "BaiChuanForCausalLM": _BAICHUAN._replace(models="Baichuan 7B and 13B, as first published"),
    "ChatGLMForCausalLM": Family(
        _chatglm,
        "GLM-4-9B (2024), ChatGLM2 and ChatGLM3, as first published",
        "also `ChatGLMModel`; `position_encoding_2d` and images are refused",
        renamed={
            "seq_length": ("max_position_embeddings",),
            "layernorm_epsilon": ("rms_norm_eps",),
            "kv_channels": ("head_dim",),
        },
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        derive=_chatglm_fields,
    ),
}
