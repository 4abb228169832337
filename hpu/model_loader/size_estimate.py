"""How large a model is, from its config alone: parameters, KV blocks, activations, by card. Pure;
a test holds the parameters equal to those of the real decoders."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from config.errors import ConfigError
from config.model.model_config import ModelConfig


class Extras(NamedTuple):
    """Parameters that only some families have."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False


def _as_told(config: ModelConfig) -> Extras:
    return Extras(config.attention_bias, config.attention_out_bias, config.mlp_bias)


EXTRAS: Mapping[str, Callable[[ModelConfig], Extras]] = {
    "LlamaForCausalLM": _as_told,
    "GraniteForCausalLM": _as_told,
    "MistralForCausalLM": lambda config: Extras(),
    "Phi3ForCausalLM": lambda config: Extras(),
    "Qwen2ForCausalLM": lambda config: Extras(qkv_bias=True),
    "Qwen3ForCausalLM": lambda config: Extras(
        config.attention_bias, config.attention_out_bias, head_norm=True
    ),
}
"""By architecture, as hpu/models/ builds them."""


class Parameters(NamedTuple):
    """Numbers of parameters: those that tensor parallelism divides, and those on every card."""

    split: int
    whole: int

    @property
    def total(self) -> int:
        return self.split + self.whole


def count_parameters(config: ModelConfig) -> Parameters:
    """The parameters of the model. ConfigError for an architecture that we do not build."""
    if config.architecture not in EXTRAS:
        raise ConfigError(
            f"{config.path} is a {config.architecture}, supported are {', '.join(EXTRAS)}"
        )
    extras = EXTRAS[config.architecture](config)
    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_heads * config.head_dim
    qkv = query + 2 * config.num_kv_heads * config.head_dim
    split = qkv * hidden + query * hidden + 3 * inner * hidden
    split += qkv * extras.qkv_bias + 2 * inner * extras.mlp_bias
    # One row a head, so that queries and keys are normed at once.
    split += (config.num_heads + config.num_kv_heads) * config.head_dim * extras.head_norm
    whole = 2 * hidden + hidden * extras.out_bias + hidden * extras.mlp_bias
    tables = 1 if config.tie_word_embeddings else 2
    return Parameters(
        split * config.num_layers + tables * config.vocab_size * hidden,
        whole * config.num_layers + hidden,
    )


def rotary_peak_bytes(config: ModelConfig, length: int) -> int:
    """What it takes at once, in float32, to make the rotary table for `length` tokens: the angles,
    their cosines, sines and negated sines (half a turn each), and all joined (two turns)."""
    return int(config.head_dim * config.partial_rotary_factor) * length * 4 * 4


def check_split(config: ModelConfig, num_cards: int) -> None:
    """ConfigError, with both numbers, when the model cannot be divided among so many cards."""
    for count, what in (
        (config.num_heads, "query heads"),
        (config.num_kv_heads, "key heads"),
        (config.vocab_size, "tokens in the vocabulary"),
        (config.intermediate_size, "inner features"),
    ):
        if count % num_cards:
            raise ConfigError(
                f"{config.path} has {count} {what}, and {num_cards} (tensor-parallel-size) does "
                "not divide them"
            )


def weight_bytes(config: ModelConfig, *, num_cards: int, width: int, length: int) -> int:
    """Weights on one of `num_cards`, in numbers of `width` bytes, with the rotary table for
    sequences of `length` tokens."""
    count = count_parameters(config)
    # Cosines and sines of a whole turn each.
    rotary = 2 * int(config.head_dim * config.partial_rotary_factor) * length
    return (count.split // num_cards + count.whole + rotary) * width


def kv_block_bytes(config: ModelConfig, *, num_cards: int, width: int, block_size: int) -> int:
    """One KV block of all layers on one card: keys and values of its share of the heads."""
    heads = config.num_kv_heads // num_cards
    return 2 * config.num_layers * heads * config.head_dim * width * block_size


def activation_bytes(
    config: ModelConfig, *, num_cards: int, width: int, num_tokens: int, num_seqs: int
) -> int:
    """An estimate for the widest launch: one layer's activations, and the logits of all sequences
    in float32 beside what sampling makes of them."""
    layer = num_tokens * (6 * config.hidden_size + 3 * config.intermediate_size // num_cards)
    return layer * width + num_seqs * config.vocab_size * 4 * 4


def context_bytes(
    config: ModelConfig, *, num_cards: int, width: int, num_tokens: int, max_model_len: int
) -> int:
    """An estimate of what cached context adds to the widest prefill: the mask of its tokens over a
    full context, made in float32 and kept in `width` bytes, and one layer's keys and values,
    gathered from the cache and then joined with the new ones."""
    heads = config.num_kv_heads // num_cards
    gathered = 2 * max_model_len * heads * config.head_dim * width
    mask = min(num_tokens, max_model_len) * max_model_len * (4 + width)
    return mask + 2 * gathered
