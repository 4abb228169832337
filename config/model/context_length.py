"""Context length of a checkpoint from its positions and its rope scaling, as vLLM derives it."""

from config.model.model_config import MAX_POSITION, ModelConfig, RopeScaling

_SCALED_POSITIONS = "Gemma3"
"""Architectures with this prefix have max_position_embeddings after the scaling."""
_LONGROPE = "longrope"
_EXTENDING = ("linear", "dynamic", "yarn")
"""Rope scalings whose factor extends the context."""
_POSITIONS, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
_LONGEST = "model_max_length"
"""Field that replaces max_position_embeddings: Command R has 8,192 in max_position_embeddings and
reads 131,072 tokens."""
_ROPE_FIELDS = ("rope_theta", "rope_parameters", "rope_scaling")
_SHORTER = ("max_sequence_length", "max_seq_length", "seq_length", "seq_len")


def max_context_length(facts: ModelConfig) -> int:
    """Maximum number of tokens that the checkpoint was made for.

    1. A yarn rope: original_max_position_embeddings, or else the length of 3, times factor.
    2. A linear or dynamic rope: the same product.
    3. Otherwise model_max_length, if a rope computes positions, or else the smallest of
       max_position_embeddings, max_sequence_length, max_seq_length, seq_length and seq_len. Files
       with llama3 and longrope, and Gemma 3, have the scaled length there.

    The rope with a factor counts if layer types have different ropes. An encoder has the length of
    its position table.
    """
    _, length, scaling = _parts(facts)
    factor = 1.0 if scaling is None else scaling.factor
    return max(1, min(int(length * factor), MAX_POSITION))


def default_context_length(facts: ModelConfig) -> int:
    """Context length without --max-model-len: `max_context_length`; for longrope the original
    length, since the frequencies of longer contexts degrade short texts."""
    scaling, longest = facts.rope.scaling, max_context_length(facts)
    if scaling is not None and scaling.kind == _LONGROPE and scaling.original_max_position:
        return min(scaling.original_max_position, longest)
    return longest


def describe_context_length(facts: ModelConfig) -> str:
    """`max_context_length` and where it comes from, for messages."""
    name, length, scaling = _parts(facts)
    if scaling is None:
        return f"{length} tokens ({name})"
    return (
        f"{max_context_length(facts)} tokens ({name} {length} times the {scaling.kind} factor "
        f"{scaling.factor:g})"
    )


def _parts(facts: ModelConfig) -> tuple[str, int, RopeScaling | None]:
    """The field with the length, the length, and the scaling that extends it."""
    scaling = _extending(facts)
    if scaling is not None and scaling.original_max_position:
        return _ORIGINAL, scaling.original_max_position, scaling
    if facts.encoder is not None:
        return _POSITIONS, facts.max_position, None
    longest = _length(facts, _LONGEST)
    # The table of learned positions ends at max_position_embeddings.
    has_rope = any(facts.fields.raw.get(name) is not None for name in _ROPE_FIELDS)
    if longest is not None and (has_rope or longest < facts.max_position):
        return _LONGEST, longest, scaling
    lengths = [(facts.max_position, _POSITIONS)]
    for name in _SHORTER:
        length = _length(facts, name)
        if length is not None and length < lengths[-1][0]:
            lengths.append((length, name))
    return lengths[-1][1], lengths[-1][0], scaling


def _length(facts: ModelConfig, name: str) -> int | None:
    """A length in config.json; None for numbers above all limits."""
    value = facts.fields.raw.get(name)
    is_length = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_POSITION
    return value if is_length else None


def _extending(facts: ModelConfig) -> RopeScaling | None:
    """The scaling that extends the context beyond max_position_embeddings, if any."""
    if facts.encoder is not None or facts.architecture.startswith(_SCALED_POSITIONS):
        return None
    ropes = [facts.rope] if facts.local_rope is None else [facts.rope, facts.local_rope]
    for rope in ropes:
        if rope.scaling is not None and rope.scaling.kind in _EXTENDING:
            return rope.scaling
    return None
