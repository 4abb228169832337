"""Memory that a model needs on each card, from its config alone: weights, KV blocks, activations.

Imports no torch. A test compares the number of parameters with that of the built models.
"""

from config.checkpoint.weight_map import decoder_weight_map
from config.errors import ConfigError
from config.model.architectures import decoder_spec
from config.model.model_config import ModelConfig


def count_parameters(config: ModelConfig, num_cards: int = 1) -> int:
    """Parameters on each of `num_cards`. ConfigError for an architecture that is not supported."""
    weight_map = decoder_weight_map(config, decoder_spec(config))
    return sum(spec.num_elements(num_cards) for spec in weight_map.entries())


def rotary_peak_bytes(config: ModelConfig, length: int) -> int:
    """Peak memory, in float32, of building the rotary table for `length` tokens: the angles, their
    cosines, sines and negated sines (half of the rotated size each), and the table itself (twice
    the rotated size)."""
    return int(config.head_dim * config.partial_rotary_factor) * length * 4 * 4


def check_split(config: ModelConfig, num_cards: int) -> None:
    """ConfigError, with both numbers, when the model cannot be divided among so many cards."""
    kv_heads = config.num_kv_heads
    if num_cards > kv_heads and num_cards % kv_heads:
        raise ConfigError(
            f"{config.path} has {kv_heads} KV heads, and they cannot be repeated evenly on "
            f"{num_cards} cards (tensor-parallel-size): use a multiple or a divisor of {kv_heads}"
        )
    for count, what in (
        (config.num_heads, "query heads"),
        (max(kv_heads, num_cards), "KV heads"),
        (config.vocab_size, "tokens in the vocabulary"),
        (config.intermediate_size, "inner features"),
    ):
        if count % num_cards:
            raise ConfigError(
                f"{config.path} has {count} {what}, and {num_cards} (tensor-parallel-size) does "
                "not divide them"
            )


def weight_bytes(config: ModelConfig, *, num_cards: int, width: int, length: int) -> int:
    """Weights on one of `num_cards`, `width` bytes each, with the rotary table for sequences of
    `length` tokens."""
    # Cosines and sines, each of the rotated size.
    rotary = 2 * int(config.head_dim * config.partial_rotary_factor) * length
    return (count_parameters(config, num_cards) + rotary) * width


def kv_block_bytes(config: ModelConfig, *, num_cards: int, width: int, block_size: int) -> int:
    """One KV block of all layers on one card: keys and values of its shard of the heads."""
    heads = config.kv_heads_per_rank(num_cards)
    return 2 * config.num_layers * heads * config.head_dim * width * block_size


def activation_bytes(
    config: ModelConfig, *, num_cards: int, width: int, num_tokens: int, num_seqs: int
) -> int:
    """Estimate for the largest launch: one layer's activations, and the logits of all sequences in
    float32 with the copies that sampling makes."""
    layer = num_tokens * (6 * config.hidden_size + 3 * config.intermediate_size // num_cards)
    return layer * width + num_seqs * config.vocab_size * 4 * 4


def context_bytes(
    config: ModelConfig, *, num_cards: int, width: int, num_tokens: int, max_model_len: int
) -> int:
    """Estimate of what cached context adds to the largest prefill: the mask of its tokens over a
    full context, built in float32 and stored in `width` bytes, and one layer's keys and values,
    gathered from the cache and then concatenated with the new ones."""
    heads = config.kv_heads_per_rank(num_cards)
    gathered = 2 * max_model_len * heads * config.head_dim * width
    mask = min(num_tokens, max_model_len) * max_model_len * (4 + width)
    return mask + 2 * gathered
