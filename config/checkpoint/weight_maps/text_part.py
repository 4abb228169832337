"""Maps tensor names in multimodal checkpoints to names of the text model."""

OUTSIDE = "(no text) "
"""Prefix of the mapped names of tensors outside the text model."""

_PREFIXES = {
    # The next two entries are names of Kimi K2.5 as saved by transformers 5.24.
    "language_model.model.blocks.": "model.layers.",
    "language_model.output.": "output.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language.model.": "model.",
    "language.lm_head.": "lm_head.",
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
    "llm.model.": "model.",
    "llm.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "model.layers.": "model.layers.",
    "model.embed_tokens.": "model.embed_tokens.",
    "model.norm.": "model.norm.",
    "lm_head.": "lm_head.",
}
"""Prefix in a multimodal checkpoint -> prefix in a text-only checkpoint."""

UNLOADED = (
    "model.embed_tokens_extend.audio_embed",
    "model.embed_tokens_extend.image_embed.img_processor.head",
    "model.embed_tokens_extend.image_embed.img_processor.post_layernorm",
)
"""Modules that compute neither text nor image embeddings, so they are not loaded."""


def text_part_name(name: str) -> str:
    """Name of the tensor in a text-only checkpoint, with the prefix OUTSIDE if the tensor does not
    belong to the text model."""
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name[len(prefix) :]
    return OUTSIDE + name
