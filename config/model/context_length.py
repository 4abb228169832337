"""Context length of a checkpoint, from its positions and rope scaling, as vLLM derives it."""

from config.model.model_config import MAX_POSITION, ModelConfig, RopeScaling

_SCALED_POSITIONS = "Gemma3"
"""Prefix of architectures whose max_position_embeddings already includes the scaling."""
_LONGROPE = "longrope"
_EXTENDING = ("linear", "dynamic", "yarn")
"""Rope scalings with a factor that extends the context."""
_POSITIONS, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
_LONGEST = "model_max_length"
"""Field that overrides max_position_embeddings: Command R has 8,192 in max_position_embeddings and
supports 131,072 tokens."""
_ROPE_FIELDS = ("rope_theta", "rope_parameters", "rope_scaling")
_SHORTER = ("max_sequence_length", "max_seq_length", "seq_length", "seq_len")


def max_context_length(model_config: ModelConfig) -> int:
    """Maximum number of tokens that the checkpoint was made for: a length times the factor of a
    yarn, linear or dynamic rope.

    The length is original_max_position_embeddings of such a rope, if present. Otherwise it is
    model_max_length, if config.json has a rope field or it is below max_position_embeddings.
    Otherwise it is the smallest of max_position_embeddings, max_sequence_length, max_seq_length,
    seq_length and seq_len. For llama3 and longrope, and for Gemma 3, these fields already include
    the scaling.

    If layer types have different ropes, the rope with a factor applies. For an encoder, the length
    is `max_position`. The result is at most MAX_POSITION.
    """
    _, length, scaling = _parts(model_config)
    factor = 1.0 if scaling is None else scaling.factor
    return max(1, min(int(length * factor), MAX_POSITION))


def default_context_length(model_config: ModelConfig) -> int:
    """Context length without --max-model-len: `max_context_length`; for longrope the original
    length, since the frequencies for longer contexts degrade short texts."""
    scaling, longest = model_config.rope.scaling, max_context_length(model_config)
    if scaling is not None and scaling.kind == _LONGROPE and scaling.original_max_position:
        return min(scaling.original_max_position, longest)
    return longest


def describe_context_length(model_config: ModelConfig) -> str:
    """`max_context_length` and its source, for messages."""
    name, length, scaling = _parts(model_config)
    if scaling is None:
        return f"{length} tokens ({name})"
    return (
        f"{max_context_length(model_config)} tokens ({name} {length} times the {scaling.kind} "
        f"factor {scaling.factor:g})"
    )


def _parts(model_config: ModelConfig) -> tuple[str, int, RopeScaling | None]:
    """(field of the length, length, scaling that extends it)."""
    scaling = _extending(model_config)
    if scaling is not None and scaling.original_max_position:
        return _ORIGINAL, scaling.original_max_position, scaling
    if model_config.is_encoder:
        return _POSITIONS, model_config.max_position, None
    longest = _length(model_config, _LONGEST)
    # The table of learned positions ends at max_position_embeddings.
    has_rope = any(model_config.fields.raw.get(name) is not None for name in _ROPE_FIELDS)
    if longest is not None and (has_rope or longest < model_config.max_position):
        return _LONGEST, longest, scaling
    lengths = [(model_config.max_position, _POSITIONS)]
    for name in _SHORTER:
        length = _length(model_config, name)
        if length is not None and length < lengths[-1][0]:
            lengths.append((length, name))
    return lengths[-1][1], lengths[-1][0], scaling


def _length(model_config: ModelConfig, name: str) -> int | None:
    """A length in config.json; None for a value that is not an integer from 1 to MAX_POSITION."""
    value = model_config.fields.raw.get(name)
    is_length = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_POSITION
    return value if is_length else None


def _extending(model_config: ModelConfig) -> RopeScaling | None:
    """The scaling that extends the context beyond max_position_embeddings, if any."""
    if model_config.is_encoder or model_config.architecture.startswith(_SCALED_POSITIONS):
        return None
    ropes = (
        [model_config.rope]
        if model_config.local_rope is None
        else [model_config.rope, model_config.local_rope]
    )
    for rope in ropes:
        if rope.scaling is not None and rope.scaling.kind in _EXTENDING:
            return rope.scaling
    return None
