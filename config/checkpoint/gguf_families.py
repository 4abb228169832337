"""Table of GGUF architectures: their Hugging Face names, and the config.json fields that GGUF files
lack or store in another form."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from config.checkpoint.gguf_metadata import GgufFile
from config.errors import ConfigError
from config.json_text import Json
from config.model.family_fields import causal_name
from config.model.model_config import ModelConfig

EPS = "rms_norm_eps"


def _nothing(file: GgufFile, config: Json) -> Json:
    return {}


class GgufFamily(NamedTuple):
    """An architecture of GGUF files."""

    name: str
    """Architecture in the field `architectures` of config.json."""
    model_type: str = ""
    """model_type of config.json; empty: the GGUF architecture's name."""
    others: tuple[str, ...] = ()
    """Other architectures, which `derive` sets for some files."""
    eps: str = EPS
    """Field of the epsilon of norms."""
    optional: Mapping[str, str] = {}
    """Optional metadata keys -> fields of config.json."""
    derive: Callable[[GgufFile, Json], Json] = _nothing
    """Computes fields that override or extend `config`, the fields computed before."""


def has(file: GgufFile, part: str) -> bool:
    """Whether any of the first _BLOCKS_TO_TRY layers has the tensor `part`, such as
    `attn_q.bias`."""
    return any(f"blk.{layer}.{part}" in file.tensors for layer in range(_BLOCKS_TO_TRY))


def layer_kv_heads(file: GgufFile) -> list[int]:
    """Number of KV heads of each layer, 0 for a layer without attention; empty if the file has no
    list of these numbers."""
    key = f"{file.architecture}.attention.head_count_kv"
    if not isinstance(file.metadata.get(key), list):
        return []
    return file.values(key, int) or []


_BLOCKS_TO_TRY = 4
"""Number of leading layers that `has` searches: the first layers may differ from the others."""


def _llama(file: GgufFile, config: Json) -> Json:
    """Architecture fields of Mistral and Mixtral, whose GGUF architecture is also llama: experts
    mark a Mixtral, and a sliding window marks a Mistral."""
    if file.get("expert_count", int):
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    if file.get("attention.sliding_window", int):
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return {}


def _granite(file: GgufFile, config: Json) -> Json:
    names = {
        "embedding_scale": "embedding_multiplier",
        "attention.scale": "attention_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    found = {ours: file.get(name, float) for name, ours in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def _gemma2(file: GgufFile, config: Json) -> Json:
    return {**_query_scalar(config, layers_of_27b=46), **_soft_caps(file)}


def _gemma3(file: GgufFile, config: Json) -> Json:
    local = file.get("rope.freq_base_swa", float)
    return {
        **_query_scalar(config, layers_of_27b=62),
        **_soft_caps(file),
        "rope_local_base_freq": 10000.0 if local is None else local,
        "rope_theta": config["rope_theta"] if file.get("rope.freq_base", float) else 1e6,
    }


def _query_scalar(config: Json, layers_of_27b: int) -> Json:
    """query_pre_attn_scalar, which files lack. It is the head size, except in the 27B models, which
    llama.cpp recognizes by their number of layers."""
    size = config["head_dim"]
    if config["num_hidden_layers"] == layers_of_27b:
        size = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": size}


def _soft_caps(file: GgufFile) -> Json:
    return {
        "attn_logit_softcapping": file.get("attn_logit_softcapping", float),
        "final_logit_softcapping": file.get("final_logit_softcapping", float),
    }


def _qwen_moe(file: GgufFile, config: Json) -> Json:
    # Constants of the architecture in llama.cpp.
    return {"norm_topk_prob": file.architecture != "qwen2moe", "decoder_sparse_step": 1}


def _qwen3_next(file: GgufFile, config: Json) -> Json:
    heads = file.count("ssm.time_step_rank")
    return {
        "norm_topk_prob": True,
        "linear_num_key_heads": file.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": file.count("ssm.state_size"),
        "linear_value_head_dim": file.count("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": file.count("ssm.conv_kernel"),
        "full_attention_interval": file.count("full_attention_interval", 4),
    }


def _deepseek2(file: GgufFile, config: Json) -> Json:
    # In newer files, attention.key_length is kv_lora_rank plus the rope dimensions.
    key = file.get("attention.key_length_mla", int) or file.count("attention.key_length")
    value = file.get("attention.value_length_mla", int) or file.count("attention.value_length")
    rotated = file.count("rope.dimension_count")
    if key <= rotated:
        raise ConfigError(
            f"{file.path} applies rope to {rotated} dimensions of a head, which has {key}"
        )
    found: Json = {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": file.get("attention.q_lora_rank", int),
        "kv_lora_rank": file.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "moe_layer_freq": 1,
        "scoring_func": _scoring(file, default=_SOFTMAX),
        "norm_topk_prob": file.get("expert_weights_norm", bool) or False,
    }
    if has(file, "exp_probs_b.bias"):
        # Published models with a correction bias use sigmoid scores.
        found |= {
            "scoring_func": _scoring(file, default=_SIGMOID),
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "topk_method": "noaux_tc",
        }
    else:
        is_grouped = (file.get("expert_group_count", int) or 1) > 1
        found["topk_method"] = "group_limited_greedy" if is_grouped else "greedy"
    scaling = config.get("rope_scaling")
    factor = file.get("rope.scaling.yarn_log_multiplier", float)
    if scaling is not None and factor is not None:
        # Published models have the same number in both fields.
        mscale = round(10 * factor, 6)
        found["rope_scaling"] = {**scaling, "mscale": mscale, "mscale_all_dim": mscale}
    return found


_SOFTMAX, _SIGMOID = 1, 2


def _scoring(file: GgufFile, default: int) -> str:
    kind = file.get("expert_gating_func", int) or default
    if kind not in (_SOFTMAX, _SIGMOID):
        raise ConfigError(
            f"{file.architecture}.expert_gating_func in {file.path} is {kind}, it must be 1 "
            "(softmax) or 2 (sigmoid)"
        )
    return "softmax" if kind == _SOFTMAX else "sigmoid"


def _glm4_moe(file: GgufFile, config: Json) -> Json:
    return {
        "use_qk_norm": has(file, "attn_q_norm.weight"),
        "attention_bias": has(file, "attn_q.bias"),
        "norm_topk_prob": file.get("expert_weights_norm", bool) is not False,
        # The file's number of layers includes the MTP layers.
        "num_nextn_predict_layers": file.get("nextn_predict_layers", int) or 0,
        "num_hidden_layers": config["num_hidden_layers"]
        - (file.get("nextn_predict_layers", int) or 0),
    }


def _gpt_oss(file: GgufFile, config: Json) -> Json:
    kinds = {
        tensor.tensor_type.name
        for name, tensor in file.tensors.items()
        if name.endswith("_exps.weight")
    }
    found: Json = {}
    if "MXFP4" in kinds:
        found["quantization_config"] = {"quant_method": "mxfp4"}
    if "rope_scaling" in config:
        found["rope_scaling"] = {**config["rope_scaling"], "truncate": False}
    return found


def _cohere(file: GgufFile, config: Json) -> Json:
    return {"use_qk_norm": has(file, "attn_q_norm.weight")}


def _phi(file: GgufFile, config: Json) -> Json:
    return {"tie_word_embeddings": False}


def _starcoder2(file: GgufFile, config: Json) -> Json:
    return {"use_bias": has(file, "attn_output.bias")}


def _mpt(file: GgufFile, config: Json) -> Json:
    hidden = config["hidden_size"]
    bias = file.get("attention.max_alibi_bias", float)
    return {
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "d_model": hidden,
        "max_seq_len": config["max_position_embeddings"],
        "expansion_ratio": max(1, config["intermediate_size"] // hidden),
        "attn_config": {
            "alibi": bool(bias),
            "alibi_bias_max": bias or 8.0,
            "clip_qkv": file.get("attention.clamp_kqv", float),
        },
    }


def _falcon(file: GgufFile, config: Json) -> Json:
    heads, has_two_norms = config["num_key_value_heads"], has(file, "attn_norm_2.weight")
    return {
        "num_kv_heads": heads,
        "new_decoder_architecture": has_two_norms or heads > 1,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "multi_query": True,
        "parallel_attn": True,
        "bias": has(file, "attn_qkv.bias"),
        "alibi": False,
        "ffn_hidden_size": config["intermediate_size"],
    }


def _smollm3(file: GgufFile, config: Json) -> Json:
    # Constant of the architecture in llama.cpp.
    return {"no_rope_layer_interval": 4, "use_sliding_window": False}


def _gpt2(file: GgufFile, config: Json) -> Json:
    return {
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_embd": config["hidden_size"],
        "n_inner": config["intermediate_size"],
        "n_positions": config["max_position_embeddings"],
        "multi_query": config["num_key_value_heads"] == 1,
    }


def _residual(file: GgufFile, config: Json) -> Json:
    parallel = file.get("use_parallel_residual", bool)
    return {
        "use_parallel_residual": parallel is not False,
        # StableLM reads these two fields.
        "use_qkv_bias": has(file, "attn_q.bias"),
        "qk_layernorm": has(file, "attn_q_norm.weight"),
        # GPT-NeoX reads this field.
        "attention_bias": has(file, "attn_q.bias") or has(file, "attn_qkv.bias"),
    }


def _ernie(file: GgufFile, config: Json) -> Json:
    return {"use_bias": has(file, "attn_q.bias")}


def _granite_moe(file: GgufFile, config: Json) -> Json:
    found = _granite(file, config)
    if file.get("expert_shared_feed_forward_length", int):
        found["architectures"] = ["GraniteMoeSharedForCausalLM"]
        found["model_type"] = "granitemoeshared"
    return found


def _granite_hybrid(file: GgufFile, config: Json) -> Json:
    heads, inner = file.count("ssm.time_step_rank"), file.count("ssm.inner_size")
    shared = file.get("expert_shared_feed_forward_length", int)
    return {
        **_granite(file, config),
        "layer_types": ["attention" if count else "mamba" for count in layer_kv_heads(file)],
        "position_embedding_type": "rope" if file.get("rope.scaling.finetuned", bool) else "nope",
        "shared_intermediate_size": shared or config["intermediate_size"],
        "num_local_experts": 0,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": max(1, inner // config["hidden_size"]),
        "mamba_n_groups": file.count("ssm.group_count", 1),
        "mamba_d_state": file.count("ssm.state_size"),
        "mamba_d_conv": file.count("ssm.conv_kernel"),
        "mamba_conv_bias": has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(file, "ssm_in.bias"),
    }


def _llama4(file: GgufFile, config: Json) -> Json:
    # The chunk size and the interval are constants in llama.cpp; Maverick has 128 experts.
    return {
        "intermediate_size_mlp": config["intermediate_size"],
        "attention_chunk_size": 8192,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
        "use_qk_norm": file.get("expert_count", int) != 128,
    }


def _qwen35(file: GgufFile, config: Json) -> Json:
    sections = (file.values(f"{file.architecture}.rope.dimension_sections", int) or [])[:3]
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    rope |= {"mrope_interleaved": True, "mrope_section": sections} if any(sections) else {}
    if "partial_rotary_factor" in config:
        rope["partial_rotary_factor"] = config["partial_rotary_factor"]
    return {**_qwen3_next(file, config), "rope_parameters": rope}


def _olmo2(file: GgufFile, config: Json) -> Json:
    if file.get("attention.sliding_window", int):
        raise ConfigError(
            f"{file.path} is an OLMo 3 (an olmo2 with a window), which is not supported: use an "
            "OLMo 2"
        )
    return {}


def _phimoe(file: GgufFile, config: Json) -> Json:
    return {"lm_head_bias": "output.bias" in file.tensors}


def _baichuan(file: GgufFile, config: Json) -> Json:
    """Fields of the 13B model, which uses ALiBi; llama.cpp recognizes it by its number of
    layers."""
    if config["num_hidden_layers"] != _LAYERS_OF_BAICHUAN_13B:
        return {}
    return {"max_position_embeddings": None, "model_max_length": config["max_position_embeddings"]}


_LAYERS_OF_BAICHUAN_13B = 40


def _bert(file: GgufFile, config: Json) -> Json:
    """Encoder fields. A file without token types is a DistilBERT."""
    found: Json = {"hidden_act": "gelu", "is_decoder": False}
    if "token_types.weight" in file.tensors:
        return {**found, "type_vocab_size": file.tensors["token_types.weight"].shape[-1]}
    return {
        "architectures": ["DistilBertModel"],
        "model_type": "distilbert",
        "dim": config["hidden_size"],
        "hidden_dim": config["intermediate_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "activation": "gelu",
    }


def _nomic_bert(file: GgufFile, config: Json) -> Json:
    types = file.tensors.get("token_types.weight")
    return {"hidden_act": "silu", "type_vocab_size": 1 if types is None else types.shape[-1]}


FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(
        "LlamaForCausalLM", others=("MistralForCausalLM", "MixtralForCausalLM"), derive=_llama
    ),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "granite": GgufFamily("GraniteForCausalLM", derive=_granite),
    "phi3": GgufFamily("Phi3ForCausalLM"),
    "gemma": GgufFamily("GemmaForCausalLM"),
    "gemma2": GgufFamily("Gemma2ForCausalLM", derive=_gemma2),
    "gemma3": GgufFamily("Gemma3ForCausalLM", "gemma3_text", derive=_gemma3),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", "qwen2_moe", derive=_qwen_moe),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", "qwen3_moe", derive=_qwen_moe),
    "qwen3next": GgufFamily("Qwen3NextForCausalLM", "qwen3_next", derive=_qwen3_next),
    "deepseek2": GgufFamily(
        "DeepseekV2ForCausalLM", "deepseek_v2", ("DeepseekV3ForCausalLM",), derive=_deepseek2
    ),
    "gpt-oss": GgufFamily("GptOssForCausalLM", "gpt_oss", derive=_gpt_oss),
    "glm4": GgufFamily("Glm4ForCausalLM"),
    "chatglm": GgufFamily("GlmForCausalLM", "glm"),
    "glm4moe": GgufFamily("Glm4MoeForCausalLM", "glm4_moe", derive=_glm4_moe),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", derive=_smollm3),
    "olmo2": GgufFamily("Olmo2ForCausalLM", derive=_olmo2),
    "olmoe": GgufFamily("OlmoeForCausalLM"),
    "phi2": GgufFamily("PhiForCausalLM", "phi", eps="layer_norm_eps", derive=_phi),
    "starcoder2": GgufFamily("Starcoder2ForCausalLM", eps="norm_epsilon", derive=_starcoder2),
    "command-r": GgufFamily(
        "CohereForCausalLM",
        "cohere",
        eps="layer_norm_eps",
        optional={"logit_scale": "logit_scale"},
        derive=_cohere,
    ),
    "mpt": GgufFamily("MPTForCausalLM", eps="layer_norm_epsilon", derive=_mpt),
    "falcon": GgufFamily("FalconForCausalLM", eps="layer_norm_epsilon", derive=_falcon),
    "starcoder": GgufFamily(
        "GPTBigCodeForCausalLM", "gpt_bigcode", eps="layer_norm_epsilon", derive=_gpt2
    ),
    "gpt2": GgufFamily("GPT2LMHeadModel", eps="layer_norm_epsilon", derive=_gpt2),
    "gptneox": GgufFamily("GPTNeoXForCausalLM", "gpt_neox", eps="layer_norm_eps", derive=_residual),
    "stablelm": GgufFamily("StableLmForCausalLM", eps="layer_norm_eps", derive=_residual),
    "nemotron": GgufFamily("NemotronForCausalLM", eps="norm_eps"),
    "cohere2": GgufFamily(
        "Cohere2ForCausalLM", eps="layer_norm_eps", optional={"logit_scale": "logit_scale"}
    ),
    "exaone4": GgufFamily("Exaone4ForCausalLM"),
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", derive=_ernie),
    "ernie4_5-moe": GgufFamily("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", derive=_ernie),
    "granitemoe": GgufFamily(
        "GraniteMoeForCausalLM", others=("GraniteMoeSharedForCausalLM",), derive=_granite_moe
    ),
    "granitehybrid": GgufFamily(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", derive=_granite_hybrid
    ),
    "minimax-m2": GgufFamily("MiniMaxM2ForCausalLM", "minimax_m2"),
    "llama4": GgufFamily("Llama4ForCausalLM", "llama4_text", derive=_llama4),
    "qwen35": GgufFamily("Qwen3_5ForCausalLM", "qwen3_5_text", derive=_qwen35),
    "qwen35moe": GgufFamily("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", derive=_qwen35),
    "phimoe": GgufFamily("PhimoeForCausalLM", derive=_phimoe),
    "internlm2": GgufFamily("InternLM2ForCausalLM"),
    "baichuan": GgufFamily("BaichuanForCausalLM", derive=_baichuan),
    "nomic-bert": GgufFamily(
        "NomicBertModel", "nomic_bert", eps="layer_norm_eps", derive=_nomic_bert
    ),
    "bert": GgufFamily(
        "BertModel", others=("DistilBertModel",), eps="layer_norm_eps", derive=_bert
    ),
}
"""general.architecture of a file -> family."""


def architecture_of(model_config: ModelConfig) -> str:
    """Architecture of `model_config` in the form of GgufFamily.name."""
    if model_config.encoder is not None:
        return f"{model_config.encoder.family}Model"
    return causal_name(model_config.architecture)
