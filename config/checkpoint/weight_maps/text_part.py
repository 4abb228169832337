"""Names of the text model's tensors in checkpoints of models with images or audio."""

OUTSIDE = "(no text) "
"""Before the names of tensors that are not the text model's."""

_PREFIXES = {
    # transformers 5.24 saves Kimi K2.5 so.
    "language_model.model.blocks.": "model.layers.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.output.": "output.",
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
"""Prefix of the text model's tensors -> their prefix in a checkpoint of a text model alone."""

UNLOADED = (
    "model.embed_tokens_extend.audio_embed",
    "model.embed_tokens_extend.image_embed.img_processor.head",
    "model.embed_tokens_extend.image_embed.img_processor.post_layernorm",
)
"""Modules that make neither text nor embeddings of images."""


def text_part_name(name: str) -> str:
    """The name in a checkpoint of the text model alone; with OUTSIDE before it if it is none of
    that."""
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name[len(prefix) :]
    return OUTSIDE + name
