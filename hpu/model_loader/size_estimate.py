"""Memory that a model needs on each card, computed from its config: weights, KV blocks, states,
activations. Imports no torch."""

import math
from collections.abc import Iterator
from functools import lru_cache

from config.checkpoint.weight_maps.base import WeightMap, WeightSpec
from config.checkpoint.weight_maps.decoder import decoder_weight_map
from config.checkpoint.weight_maps.shard import ShardRank, shard_of
from config.model.architectures import ARCHITECTURES, decoder_spec
from config.model.decoder_spec import LayerSpec, uniform_layers
from config.model.model_config import ModelConfig
from config.model.quantization.base import WeightScheme
from config.model.split import cross_layers_of, indexer_of, latents_of, states_of
from config.model.window_cache import CacheSizes, ring_blocks
from config.parallel import WHOLE, Stage

EXPANDED_BYTES = 2 << 30
"""Maximum bytes of the quantized experts that a layer dequantizes at once, unless a single expert
is larger."""

_EMBEDDING = "model.embed_tokens.weight"


def count_parameters(
    config: ModelConfig,
    num_cards: int = 1,
    *,
    distributes_experts: bool = False,
    num_engines: int = 1,
    stage: Stage = WHOLE,
) -> int:
    """Parameters per card of a pipeline stage with `num_cards` cards. Experts are distributed whole
    over the cards of `num_engines` engines, or each expert is sharded. The parameters of a model
    that is not built in are divided by `num_cards`. Raises ConfigError."""
    if config.architecture not in ARCHITECTURES and config.num_parameters is not None:
        return config.num_parameters // num_cards
    own = _own_specs(
        config,
        num_cards,
        distributes_experts=distributes_experts,
        num_engines=num_engines,
        stage=stage,
    )
    return sum(spec.num_elements() * count for spec, count in own)


def layer_bytes(config: ModelConfig, *, num_cards: int, width: int) -> list[int]:
    """Weight bytes of each layer on one of `num_cards` cards, for a built-in model without
    quantization; `width` bytes per weight."""
    weight_map, at = decoder_weight_map(config, decoder_spec(config)), ShardRank(size=num_cards)
    shards = ([shard_of(spec, at) for spec in layer] for layer in weight_map.layers)
    return [width * sum(shard.spec.num_elements() for shard in own if shard) for own in shards]


def _own_specs(
    config: ModelConfig,
    num_cards: int,
    *,
    distributes_experts: bool,
    num_engines: int,
    stage: Stage,
) -> Iterator[tuple[WeightSpec, int]]:
    """`_counted_specs` with the tensors cut to the shards of a card."""
    expert_size = num_cards * num_engines if distributes_experts else 1
    at = ShardRank(size=num_cards, expert_size=expert_size)
    for spec, count in _counted_specs(config, stage):
        shard = shard_of(spec, at)
        if shard is not None:
            yield shard.spec, count


@lru_cache(maxsize=8)
def _counted_specs(config: ModelConfig, stage: Stage) -> tuple[tuple[WeightSpec, int], ...]:
    """(tensor, number of layers with this tensor) for a pipeline stage; equal layers are listed
    once. Cached, because a large mixture of experts has 90,000 tensors."""
    weight_map = decoder_weight_map(config, decoder_spec(config))
    outer = _outer_entries(weight_map, stage, is_tied=config.tie_word_embeddings)
    counted = [(spec, 1) for spec in outer]
    layers = [weight_map.layers[index] for index in stage.layers(len(weight_map.layers))]
    kinds: list[tuple[WeightSpec, ...]] = []
    for layer in layers:
        if layer not in kinds:
            kinds.append(layer)
            count = layers.count(layer)
            counted += [(spec, count) for spec in layer]
    return tuple(counted)


def _card_bytes(spec: WeightSpec, width: int, *, expands_experts: bool) -> int:
    """Bytes of the tensor on a Gaudi, with `width` bytes per unquantized number. Weights stay
    quantized; FP8 weights that are multiplied in FP8 have a scale per output. Bitsandbytes weights,
    the matrices that latent attention absorbs and, with `expands_experts`, experts are
    dequantized."""
    scheme, part = spec.scheme, spec.part
    if scheme is None or part is None or scheme.is_flat or ".kv_b_proj." in spec.parameter:
        return spec.num_elements() * width
    if expands_experts and (spec.expert, spec.num_experts) != (None, None):
        return spec.num_elements() * width if part.role == "values" else 0
    *experts, outputs, inputs = spec.shape
    outputs *= math.prod(experts)
    if part.role == "values":
        return spec.num_elements() * scheme.bits // 8
    if part.role != "scales":
        return inputs * 4 if part.role == "groups" else 0
    if scheme.is_float:
        # FP8 weights that each launch dequantizes keep the checkpoint's scales.
        return outputs * 4 * (scheme.num_groups(inputs) if scheme.activations == "none" else 1)
    if scheme.bits == 8:
        has_zeros = any(part.role == "zeros" for part in scheme.parts)
        return outputs * scheme.num_groups(inputs) * (5 if has_zeros else 4)
    # Zero points have 4 bits and always exist on the card, stored or not.
    return outputs * scheme.num_groups(inputs) * (2 * width + 1) // 2


def has_packed_experts(config: ModelConfig) -> bool:
    """Whether the checkpoint of a built-in model has experts in 4-bit floats."""
    if config.architecture not in ARCHITECTURES:
        return False
    return any(spec.is_packed for spec, _ in _counted_specs(config, WHOLE))


def stage_entries(weight_map: WeightMap, stage: Stage, *, is_tied: bool) -> Iterator[WeightSpec]:
    """Tensors of a pipeline stage, with the same division as Decoder."""
    yield from _outer_entries(weight_map, stage, is_tied=is_tied)
    for index in stage.layers(len(weight_map.layers)):
        yield from weight_map.layers[index]


def _outer_entries(weight_map: WeightMap, stage: Stage, *, is_tied: bool) -> Iterator[WeightSpec]:
    for spec in weight_map.outer:
        if spec.parameter.startswith("model.embed_"):
            is_head = is_tied and stage.is_last and spec.parameter == _EMBEDDING
            if stage.is_first or is_head:
                yield spec
        elif stage.is_last:
            yield spec


def expanded_experts(expert_bytes: int) -> int:
    """Number of experts of `expert_bytes` (in the model's dtype) that are dequantized at once."""
    return max(1, EXPANDED_BYTES // expert_bytes)


def _expanded_bytes(config: ModelConfig, num_cards: int, width: int) -> int:
    """Bytes of a layer's experts that a card dequantizes at once; 0 if no weight has integers or
    FP8 blocks."""
    moe, quantization = config.moe, config.quantization
    if moe is None or quantization is None:
        return 0
    if not any(_is_dequantized(scheme) for scheme in quantization.schemes):
        return 0
    expert = 3 * config.hidden_size * moe.inner_size * width
    return min(moe.num_experts * expert // num_cards, expanded_experts(expert) * expert)


def _is_dequantized(scheme: WeightScheme) -> bool:
    """Whether launches may dequantize experts: integers, and FP8 with block scales."""
    return not scheme.is_flat and (not scheme.is_float or scheme.group_size is not None)


def rotary_peak_bytes(config: ModelConfig, length: int) -> int:
    """Peak bytes of building the rotary table for `length` tokens, in float32: the angles, their
    cosines, sines and negated sines (half of the rotated size each), and the table itself (twice
    the rotated size)."""
    return max(_rotated_sizes(config), default=0) * length * 4 * 4


def _rotated_sizes(config: ModelConfig) -> list[int]:
    ropes = {"default": config.rope, "local": config.local_rope}
    used = {layer.rope for layer in _layers(config)}
    return [
        rope.rotated_size(config.head_dim)
        for name, rope in ropes.items()
        if rope is not None and name in used
    ]


def count_active_parameters(config: ModelConfig) -> int:
    """Parameters that a token is multiplied by: routed experts only if the token is routed to
    them, and the embedding only if it is the output head too."""
    moe, active = config.moe, 0
    for spec, count in _counted_specs(config, WHOLE):
        size = spec.num_elements()
        if spec.parameter == _EMBEDDING and not config.tie_word_embeddings:
            continue
        if moe is not None and (spec.expert, spec.num_experts) != (None, None):
            size = size * moe.top_k // moe.num_experts
        active += size * count
    return active


def weight_bytes(
    config: ModelConfig,
    *,
    num_cards: int,
    width: int,
    length: int,
    distributes_experts: bool = False,
    num_engines: int = 1,
    stage: Stage = WHOLE,
    packs_experts: bool = False,
) -> int:
    """Weight bytes per card of a pipeline stage with `num_cards` cards, `width` bytes per weight.
    Parameters: see count_parameters; `packs_experts`: whether experts in 4-bit floats stay in 4
    bits. Includes the rotary table for `length` tokens and, on the first stage, the vision
    tower."""
    # Cosines and sines, each of the rotated size.
    rotary = 2 * sum(_rotated_sizes(config)) * length
    tower = config.num_tower_parameters if stage.is_first else 0
    mla, absorbed = latents_of(config), 0
    if mla is not None:
        num_layers = len(stage.layers(config.num_layers))
        absorbed = num_layers * config.num_heads // num_cards * mla.absorbed_size
    if config.quantization is not None and config.architecture in ARCHITECTURES:
        own = _own_specs(
            config,
            num_cards,
            distributes_experts=distributes_experts,
            num_engines=num_engines,
            stage=stage,
        )
        moe = decoder_spec(config).moe
        # No kernel for FP8 or integer experts on the card has a clamped SwiGLU.
        expands = bool(moe and moe.clamped_swiglu)
        weights = sum(
            _card_bytes(spec, width, expands_experts=expands) * count for spec, count in own
        )
        return weights + (rotary + absorbed + tower) * width
    saved = 0
    if packs_experts and has_packed_experts(config):
        specs = _own_specs(
            config,
            num_cards,
            distributes_experts=distributes_experts,
            num_engines=num_engines,
            stage=stage,
        )
        experts = [(spec, spec.packed_bytes(), count) for spec, count in specs if spec.is_packed]
        sizes = [size * count for _, size, count in experts if size is not None]
        # If a shard ends inside a block, the experts are dequantized.
        if len(sizes) == len(experts):
            plain = sum(spec.num_elements() * count for spec, _, count in experts) * width
            saved = plain - sum(sizes)
    parameters = count_parameters(
        config,
        num_cards,
        distributes_experts=distributes_experts,
        num_engines=num_engines,
        stage=stage,
    )
    return (parameters + rotary + absorbed + tower) * width - saved


def kv_block_bytes(
    config: ModelConfig, *, num_cards: int, width: int, block_size: int, stage: Stage = WHOLE
) -> int:
    """Bytes of a KV block of a stage's attention layers on a card. A block has the keys and values
    of the card's heads, or all latents, and all index keys. Layers that share keys and values count
    once if `config` gives the number of cached elements."""
    if config.cached_numbers is not None:
        return config.cached_numbers // num_cards * width * block_size
    num_layers = len(stage.layers(config.num_layers)) - len(states_of(config))
    num_layers -= cross_layers_of(config)
    token = num_layers * _cached_size(config, num_cards) + _index_size(config, stage)
    return token * width * block_size


def flag_bytes(*, width: int, block_size: int) -> int:
    """Bytes of NonFiniteGuard's flags for a block, on each card of the last pipeline stage; a flag
    has `width` bytes, like an activation."""
    return width * block_size


def kv_cache_sizes(
    config: ModelConfig, *, num_cards: int, width: int, block_size: int, num_seqs: int
) -> CacheSizes:
    """Cache sizes for blocks (see `kv_block_bytes`) and sliding-window rings. Rings exist for
    `num_seqs` sequences, the warm-up index and padding."""
    token = _cached_size(config, num_cards) * width
    block = kv_block_bytes(config, num_cards=num_cards, width=width, block_size=block_size)
    limits = [layer.window or layer.chunk for layer in _layers(config)]
    if config.cached_numbers is not None:
        # Models with shared keys and values have no rings.
        limits = []
    windows = [limit for limit in limits if limit is not None]
    tokens = sum(ring_blocks(window, block_size) for window in windows) * block_size
    return CacheSizes(
        block,
        full_block=block - len(windows) * token * block_size,
        rings=(num_seqs + 2) * tokens * token,
    )


def _cached_size(config: ModelConfig, num_cards: int) -> int:
    """Elements that a layer caches per token on a card."""
    mla = latents_of(config)
    return _kv_size(config, num_cards) if mla is None else mla.latent_size


def _index_size(config: ModelConfig, stage: Stage) -> int:
    """Elements of the index keys that the layers of a stage cache per token on a card."""
    indexer, layers = indexer_of(config), _layers(config)
    if not indexer:
        return 0
    return indexer.head_dim * sum(layers[i].indexed for i in stage.layers(len(layers)))


def state_bytes(config: ModelConfig, *, width: int, num_seqs: int, num_cards: int = 1) -> int:
    """State bytes of `num_seqs` sequences, the warm-up index and padding on a card of `num_cards`:
    convolution states with `width` bytes per number, other states in float32."""
    states = [state.on_rank(num_cards) for state in states_of(config)]
    elements = sum(state.conv_elements * width + state.state_elements * 4 for state in states)
    return (num_seqs + 2) * elements


def cross_tile_bytes(config: ModelConfig, *, num_cards: int, width: int) -> int:
    """Bytes of the keys and values of an image tile, in all cross-attention layers, on a card."""
    cross = config.cross_attention
    if cross is None:
        return 0
    return cross_layers_of(config) * cross.embeddings_per_tile * _kv_size(config, num_cards) * width


def cross_activation_bytes(
    config: ModelConfig,
    *,
    num_cards: int,
    width: int,
    num_tokens: int,
    num_seqs: int,
    num_prompts: int,
    images_per_request: int,
) -> int:
    """Estimated bytes that a cross-attention layer adds to the largest launch: a prefill of
    `num_tokens` in `num_prompts` rows or a decode of `num_seqs` rows, where each row reads the
    tiles of `images_per_request`. Float32 scores exist three times during normalization."""
    cross = config.cross_attention
    if cross is None or not cross_layers_of(config):
        return 0
    seen = images_per_request * cross.tiles_per_image * cross.embeddings_per_tile
    read = seen * _kv_size(config, num_cards) * width
    scores = 4 * seen * (1 + 3 * config.num_heads // num_cards)
    return max(
        num_tokens * scores + num_prompts * read,
        num_seqs * (scores + read),
    )


def _kv_size(config: ModelConfig, num_cards: int) -> int:
    """Elements of a token's keys and values in a layer on a card during prefill: latents are
    expanded to all heads."""
    mla = latents_of(config)
    if mla is not None:
        return 2 * config.num_heads // num_cards * mla.padded_head_dim
    return 2 * config.kv_heads_per_rank(num_cards) * config.head_dim


def _query_size(config: ModelConfig, num_cards: int) -> int:
    mla = latents_of(config)
    head_dim = config.head_dim if mla is None else mla.padded_head_dim
    return config.num_heads // num_cards * head_dim


def activation_bytes(
    config: ModelConfig,
    *,
    num_cards: int,
    width: int,
    num_tokens: int,
    num_logit_rows: int,
    num_engines: int = 1,
) -> int:
    """Estimated bytes of the largest launch: activations of a layer, its dequantized experts, the
    scan of a layer with a state, and `num_logit_rows` rows of float32 logits with the copies made
    by sampling. `num_engines`: engines that share experts."""
    moe = config.moe
    inner = config.intermediate_size
    if moe is not None:
        inner = max(inner, moe.top_k * moe.inner_size + moe.shared_size)
    layer = num_tokens * (6 * config.hidden_size + 3 * inner // num_cards)
    if num_engines > 1:
        # Tokens of all engines, and their expert outputs.
        layer += 2 * num_engines * num_tokens * config.hidden_size
    if latents_of(config) is not None:
        # The heads of latent attention may be several times as wide as the hidden state.
        layer += num_tokens * (_query_size(config, num_cards) + _kv_size(config, num_cards))
    scans = (state.on_rank(num_cards).scan_elements for state in states_of(config))
    scan = 4 * num_tokens * max(scans, default=0)
    expanded = _expanded_bytes(config, num_cards, width)
    return layer * width + expanded + scan + num_logit_rows * config.vocab_size * 4 * 4


def context_bytes(
    config: ModelConfig,
    *,
    num_cards: int,
    width: int,
    num_tokens: int,
    max_model_len: int,
    block_size: int,
    slices: tuple[int, int] | None,
) -> int:
    """Estimated bytes that cached context adds to the largest prefill, with `width` bytes per
    number. `slices`: (threshold, slice tokens) of sliced attention, see
    ExecutionConfig.slice_sizes."""
    new = min(num_tokens, max_model_len)
    kv_width = _kv_size(config, num_cards) * width
    full = windowed = 0
    limits = {layer.window or layer.chunk for layer in _layers(config)}
    if None in limits:
        threshold, size = slices or (max_model_len, max_model_len)
        full = _joined_bytes(new, min(threshold, max_model_len), width, kv_width)
        if max_model_len > threshold:
            query_width = _query_size(config, num_cards) * 4
            in_slices = _sliced_bytes(new, max_model_len, size, width, kv_width, query_width)
            full = max(full, in_slices)
    for limit in limits - {None}:
        # Blocks of a window or a chunk, plus a block because it may begin within a block.
        seen = min(max_model_len, (limit or 0) + block_size + new)
        # The mask over cached tokens also exists in float32.
        windowed += _joined_bytes(new, seen, width, kv_width) + new * (seen - new) * 4
    indexed = 0
    if indexer_of(config):
        indexed = _joined_bytes(new, max_model_len, width, kv_width)
        indexed += _index_bytes(config, num_cards, new * max_model_len, width)
    return max(full, indexed) + windowed


def _index_bytes(config: ModelConfig, num_cards: int, pairs: int, width: int) -> int:
    """Bytes of block selection for `pairs` pairs of a new and a visible token: float32 scores, the
    masked scores and a float32 mask for each KV head, and the mask in the model's data type. With
    several KV heads on a card the attention scores of all heads are in memory, three times."""
    heads = config.kv_heads_per_rank(num_cards)
    unfused = 3 * config.num_heads // num_cards * width if heads > 1 else 0
    return pairs * (heads * (3 * 4 + width) + unfused)


def _layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Specs of the layers. A model that is not built in has uniform layers, from config.json."""
    if config.architecture in ARCHITECTURES:
        return decoder_spec(config).layers
    return uniform_layers(config)


def _joined_bytes(new: int, length: int, width: int, kv_width: int) -> int:
    """Bytes of a mask of `new` x `length` tokens, the float32 mask of the new tokens, and a layer's
    keys and values, gathered from the cache and then concatenated with the new keys and values."""
    return new * length * width + new * new * 4 + 2 * length * kv_width


def _sliced_bytes(
    new: int, length: int, size: int, width: int, kv_width: int, query_width: int
) -> int:
    """Bytes of a causal mask over a slice and a mask row of `length`, both also in float32; keys
    and values of a slice, gathered and then made contiguous; and float32 outputs of all new tokens,
    plus four times the outputs of a slice while two parts are merged."""
    rows = min(new, size)
    masks = (rows * rows + length) * (4 + width)
    return masks + 2 * size * kv_width + (new + 4 * rows) * query_width
