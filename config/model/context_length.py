"""Context length of a checkpoint from its positions and its rope scaling, as vLLM derives it."""

from config.model.model_config import MAX_POSITION, ModelConfig, RopeScaling

_SCALED_POSITIONS = "Gemma3"
"""Architectures with this prefix have max_position_embeddings after the scaling."""
_LONGROPE = "longrope"
_EXTENDING = ("linear", "dynamic", "yarn")
"""Rope scalings whose factor extends the context."""


def max_context_length(facts: ModelConfig) -> int:
    """Maximum number of tokens that the checkpoint was made for.

    1. A yarn rope: original_max_position_embeddings times factor. Without the first number,
       max_position_embeddings is the original length.
    2. A linear or dynamic rope: the same where the original length is given, else
       max_position_embeddings times factor.
    3. Otherwise max_position_embeddings, which llama3, longrope and Gemma 3 have scaled already.

    With different ropes per layer type, the rope with a factor counts.
    """
    scaling = _extending(facts)
    if scaling is None:
        return facts.max_position
    base = scaling.original_max_position or facts.max_position
    return max(1, min(int(base * scaling.factor), MAX_POSITION))


def default_context_length(facts: ModelConfig) -> int:
    """The length served without --max-model-len: `max_context_length`; with longrope the original
    length, since the frequencies of longer contexts make short texts worse."""
    scaling = facts.rope.scaling
    if scaling is not None and scaling.kind == _LONGROPE and scaling.original_max_position:
        return min(scaling.original_max_position, facts.max_position)
    return max_context_length(facts)


def describe_context_length(facts: ModelConfig) -> str:
    """`max_context_length` and where it comes from, for messages."""
    scaling, length = _extending(facts), max_context_length(facts)
    if scaling is None:
        return f"{length} tokens (max_position_embeddings)"
    name = "max_position_embeddings"
    if scaling.original_max_position:
        name = f"original_{name}"
    base = scaling.original_max_position or facts.max_position
    return f"{length} tokens ({name} {base} times the {scaling.kind} factor {scaling.factor:g})"


def _extending(facts: ModelConfig) -> RopeScaling | None:
    """The scaling that extends the context beyond max_position_embeddings, if any."""
    if facts.encoder is not None or facts.architecture.startswith(_SCALED_POSITIONS):
        return None
    ropes = [facts.rope] if facts.local_rope is None else [facts.rope, facts.local_rope]
    for rope in ropes:
        if rope.scaling is not None and rope.scaling.kind in _EXTENDING:
            return rope.scaling
    return None
