"""Writes a checkpoint with random weights and a real shape, for benchmarks: a dense Llama of 1.17
billion parameters, or a mixture of experts (Qwen3-MoE) of 0.95 billion, with 0.19 billion for each
token.

    python benchmarks/checkpoints.py dense TOKENIZER_FOLDER OUT_FOLDER

The tokenizer comes from another checkpoint with 49,152 tokens, such as the demo model. The model
only generates tokens that are words, so that each token is text and no answer ends early.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY = 49_152
COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 64,
        **COMMON,
    },
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **COMMON,
    },
}
STD = 0.02
SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
"""A space in a byte-level vocabulary."""


def tensors(config: dict[str, Any], words: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all weights. Logits of tokens that are not in `words` (their ids) are 0,
    which is never the largest."""
    hidden = config["hidden_size"]
    head = torch.zeros(VOCABULARY, hidden, dtype=torch.bfloat16)
    head[words] = _random(len(words), hidden)
    yield "lm_head.weight", head
    yield "model.embed_tokens.weight", _random(VOCABULARY, hidden)
    yield "model.norm.weight", _ones(hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, tensor in _layer(config):
            yield f"model.layers.{layer}.{name}", tensor


def _layer(config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", _ones(hidden)
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{name}_proj.weight", _random(rows, hidden)
    yield "self_attn.o_proj.weight", _random(hidden, queries)
    if "num_experts" not in config:
        yield from _mlp("mlp", hidden, config["intermediate_size"])
        return
    for name in ("q_norm", "k_norm"):
        yield f"self_attn.{name}.weight", _ones(size)
    yield "mlp.gate.weight", _random(config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        yield from _mlp(f"mlp.experts.{expert}", hidden, config["moe_intermediate_size"])


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, Tensor]]:
    for name in ("gate", "up"):
        yield f"{prefix}.{name}_proj.weight", _random(inner, hidden)
    yield f"{prefix}.down_proj.weight", _random(hidden, inner)


def _random(*shape: int) -> Tensor:
    return (torch.randn(shape) * STD).bfloat16()


def _ones(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def word_ids(tokenizer: Path) -> Tensor:
    """Ids of tokens of ASCII letters, with or without a leading space."""
    vocabulary: dict[str, int] = json.loads(tokenizer.read_text())["model"]["vocab"]
    words = (token.removeprefix(SPACE) for token in vocabulary)
    return torch.tensor(
        [
            number
            for word, number in zip(words, vocabulary.values(), strict=True)
            if word.isascii() and word.isalpha()
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=CONFIGS)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    config, out = CONFIGS[arguments.shape], arguments.out
    out.mkdir(parents=True, exist_ok=True)
    # Newer releases of transformers write the chat template to a separate file.
    for source in (*arguments.tokenizer.glob("tokenizer*"), *arguments.tokenizer.glob("chat_*")):
        shutil.copy(source, out)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    (out / "generation_config.json").write_text(json.dumps(ends))
    (out / "config.json").write_text(json.dumps(config, indent=1))
    torch.manual_seed(0)
    weights = dict(tensors(config, word_ids(out / "tokenizer.json")))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    print(f"{sum(weight.numel() for weight in weights.values()):,} parameters in {out}")


if __name__ == "__main__":
    main()
