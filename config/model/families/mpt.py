"""MPT: layer norms without biases, ALiBi, fused query-key-value weight."""

from collections.abc import Mapping
from typing import Any

from config.errors import ConfigError
from config.model.decoder_spec import DecoderSpec, Family, uniform_layers, without_rope
from config.model.json_fields import Fields, shown
from config.model.model_config import ModelConfig


def _mpt(config: ModelConfig) -> DecoderSpec:
    fields, attention = config.fields, _attention_fields(config.fields)
    norms = (None, "layernorm", "low_precision_layernorm")
    _refuse_others(fields, {"no_bias": (True,), "logit_scale": (None,), "norm_type": norms})
    _refuse_others(
        attention,
        {
            "alibi": (True,),
            "attn_type": (None, "multihead_attention"),
            "prefix_lm": (None, False),
            "qk_ln": (None, False),
        },
    )
    return DecoderSpec(
        layers=without_rope(uniform_layers(config), (False,) * config.num_layers),
        norm="layer",
        gated_mlp=False,
        attention_scale=attention.number_or_none("softmax_scale", above=0.0),
        alibi_max_bias=attention.number("alibi_bias_max", 8.0, above=0.0),
        qkv_layout="fused",
        names={
            "model.layers": "transformer.blocks",
            "model.embed_tokens": "transformer.wte",
            "model.norm": "transformer.norm_f",
            "input_layernorm": "norm_1",
            "post_attention_layernorm": "norm_2",
            "self_attn.qkv_proj": "attn.Wqkv",
            "self_attn.o_proj": "attn.out_proj",
            "mlp.up_proj": "ffn.up_proj",
            "mlp.down_proj": "ffn.down_proj",
        },
    )


def _refuse_others(fields: Fields, supported: Mapping[str, tuple[object, ...]]) -> None:
    for name, values in supported.items():
        value = fields.raw.get(name)
        if value not in values:
            raise ConfigError(
                f"{name} in {fields.file} is {shown(value)}, which is not supported for MPT"
            )


def _attention_fields(fields: Fields) -> Fields:
    return Fields({"alibi": True, **fields.get("attn_config", dict, {})}, fields.file)


def _derived(fields: Fields) -> Mapping[str, Any]:
    hidden_size = fields.count("hidden_size")
    return {
        "num_key_value_heads": fields.count("num_attention_heads"),
        "intermediate_size": fields.count("expansion_ratio") * hidden_size,
        # 0 and null mean no limit.
        "clip_qkv": _attention_fields(fields).raw.get("clip_qkv") or None,
    }


_MPT = Family(
    _mpt,
    "MPT 7B, 30B, StoryWriter",
    "with `alibi`; `qk_ln`, `prefix_lm`, `logit_scale`, biases refused",
    renamed={"layer_norm_epsilon": ("rms_norm_eps",)},
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "expansion_ratio": 4,
        "no_bias": True,
        "tie_word_embeddings": True,
    },
    derive=_derived,
)

FAMILIES: Mapping[str, Family] = {
    "MptForCausalLM": _MPT,
    "MPTForCausalLM": _MPT._replace(models="MPT, as first published"),
}
