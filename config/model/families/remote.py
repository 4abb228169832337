"""Families whose published code is in the checkpoints: a Llama with tensors of other names and
layouts. That code is never run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from config.model.decoder_spec import DecoderSpec, Family, uniform_layers, without_rope
from config.model.families.dense import llama
from config.model.json_fields import Fields
from config.model.model_config import ModelConfig

_BAICHUAN2_VOCAB = 125696
"""Vocabulary size of Baichuan 2, which distinguishes it from the first Baichuan."""


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


def _baichuan_fields(fields: Fields) -> Mapping[str, Any]:
    # Only the 7B models, whose heads are rotated, have max_position_embeddings. The 13B models
    # have ALiBi.
    if fields.raw.get("max_position_embeddings") is not None:
        return {"alibi": False}
    return {"alibi": True, "max_position_embeddings": fields.count("model_max_length")}


_BAICHUAN = Family(_baichuan, "Baichuan 7B and 13B, Baichuan 2 7B and 13B", derive=_baichuan_fields)

FAMILIES: Mapping[str, Family] = {
    "InternLM2ForCausalLM": Family(
        _internlm2, "InternLM2, InternLM2.5", renamed={"bias": ("attention_bias",)}
    ),
    "InternLM3ForCausalLM": Family(
        llama,
        "InternLM3",
        renamed={"qkv_bias": ("attention_bias",), "bias": ("attention_out_bias", "mlp_bias")},
        # transformers 5 saves the two other names.
        derive=lambda fields: {
            "attention_out_bias": fields.get(
                "attention_out_bias", bool, fields.get("mlp_bias", bool, False)
            )
        },
    ),
    "BaichuanForCausalLM": _BAICHUAN,
    "BaiChuanForCausalLM": _BAICHUAN._replace(models="Baichuan 7B and 13B, the first files"),
}
