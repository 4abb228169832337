"""Tiny random checkpoints of every family as folders, with a byte-level tokenizer."""

import functools
import json
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from releases import transformers_before
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
BOS, IM_START, EOS, PAD = range(4)

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    # Large random weights: with the usual range, a random model repeats the same few tokens.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}

_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_GATED_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "head_dim": 32,
}

_SHORT_CONV: dict[str, Any] = {
    "layer_types": ["conv", "full_attention"],
    "norm_eps": 1e-5,
    "block_auto_adjust_ff_dim": False,
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 32},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "attention_multiplier": 0.2,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "moe_intermediate_size": 48,
        "use_qk_norm": True,
    },
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 48},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 9,
        "swiglu_limit": 2.0,
    },
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "head_dim": 16,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 7,
        "no_rope_layer_interval": 2,
        "floor_scale": 8,
        "attn_scale": 0.5,
    },
    "phimoe": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "qwen3_next": {
        **_GATED_DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_5_moe_text": {
        **_GATED_DELTA,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 40,
    },
    "lfm2": _SHORT_CONV,
    "lfm2_moe": {
        **_SHORT_CONV,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
    "minimax_m3_vl_text": {
        **{"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        **{"head_dim": 16, "rotary_dim": 8, "intermediate_size": 48},
        **{"dense_intermediate_size": 80, "shared_intermediate_size": 40, "swiglu_limit": 1.5},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
        **{"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4},
        **{"index_topk_blocks": 3, "index_local_blocks": 1},
    },
    "deepseek_v2": {
        **_DEEPSEEK,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": _DEEPSEEK,
}

FAMILIES = {name: fields for name, fields in _FAMILIES.items() if name in CONFIG_MAPPING}
"""Families that the installed transformers has."""

WITH_STATES = frozenset(
    name
    for name, fields in _FAMILIES.items()
    if {"linear_attention", "conv"} & set(fields.get("layer_types", ()))
)
"""Families with layers that keep a state per request; they support no prefix caching."""

CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


Make = TypeVar("Make", bound=Callable[..., Path])


def built_once(make: Make) -> Make:
    """`make(family, folder, **fields)` with a cache: the files of an earlier call with the same
    arguments are copied. Building a model takes longer than most tests, and most tests use one of
    few models."""

    @functools.lru_cache(maxsize=32)
    def files_of(family: str, fields: bytes) -> Mapping[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            make(family, folder, **pickle.loads(fields))
            return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

    @functools.wraps(make)
    def write(family: str, folder: Path | str, **fields: Any) -> Path:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files_of(family, pickle.dumps(fields)).items():
            (folder / name).write_bytes(content)
        return folder

    return cast(Make, write)


@built_once
def make_tiny(
    family: str, folder: Path | str, *, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any
) -> Path:
    """Write a float32 checkpoint of `family` (a model_type of transformers) into `folder`; returns
    the folder.

    Equal arguments give equal weights. `overrides`: fields of the family's config.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fields = rope_fields({**COMMON, **FAMILIES.get(family, {}), **overrides})
    config = AutoConfig.for_model(family, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Not passed as a keyword, because transformers 4 calls it torch_dtype.
        model: Any = AutoModelForCausalLM.from_config(config).float()  # type: ignore[no-untyped-call]  # theirs
        # Randomize norms and biases: with initial values of 1 and 0, a loader that mixes them up
        # would not be noticed.
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name or name.endswith(("bias", "sinks")):
                parameter.data += 0.2 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer += 0.2 * torch.randn_like(buffer)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def rope_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with rotary settings in the spelling of the installed transformers: version 4 would
    ignore rope_parameters."""
    if not transformers_before("5") or "rope_parameters" not in fields:
        return fields
    rest = {name: value for name, value in fields.items() if name != "rope_parameters"}
    rope = dict(fields["rope_parameters"])
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            rest[name] = rope.pop(name)
    kind = rope.get("rope_type", "default")
    if kind == "longrope":
        # Phi-3's config takes three fields and the older name; the trained length is a separate
        # field.
        rest["original_max_position_embeddings"] = rope.pop(
            "original_max_position_embeddings", rest.get("original_max_position_embeddings")
        )
        rope = {name: rope[name] for name in ("short_factor", "long_factor")} | {"type": kind}
    if kind != "default":
        rest["rope_scaling"] = rope
    return rest


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of VOCAB_SIZE tokens, which all have a text, and a chat
    template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(first, second) for first in "Ġabcdefghilmnoprstuwy" for second in "aeio"]
    merges = pairs[: VOCAB_SIZE - len(alphabet) - len(SPECIAL_TOKENS)]
    tokens = [*SPECIAL_TOKENS, *alphabet, *(first + second for first, second in merges)]
    assert len(tokens) == VOCAB_SIZE
    encoder = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(list(SPECIAL_TOKENS))
    encoder.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[PAD],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
