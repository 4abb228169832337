"""Vision settings of a model, from its config.json."""

from dataclasses import dataclass

from config.model.json_fields import Fields
from config.model.multimodal.text_part import is_unknown_whole


@dataclass(frozen=True, slots=True)
class CrossFacts:
    """Images of a model with cross-attention layers. An image is a single token in the prompt, and
    has a fixed number of tiles; the last tiles may be padding."""

    tiles_per_image: int
    embeddings_per_tile: int


@dataclass(frozen=True, slots=True)
class VisionFacts:
    """Vision settings that server, engine and worker must agree on."""

    architecture: str
    """Multimodal architecture, such as LlavaForConditionalGeneration."""
    image_token_id: int
    """Placeholder token: one for each embedding of an image, or one for each image if `cross` is
    set."""
    video_token_id: int | None = None
    uses_mrope: bool = False
    """Whether positions have three axes: time, height and width (M-RoPE)."""
    whole_images: bool = False
    """Whether attention within an image is bidirectional, so that a prefill chunk must contain all
    remaining tokens of an image."""
    is_unlisted: bool = False
    """Whether the architecture is not in VISION_FAMILIES."""
    num_deepstack_layers: int = 0
    """Number of additional embeddings per image token, which are added to the outputs of the first
    layers (Meng et al., DeepStack, 2024)."""

    cross: CrossFacts | None = None
    """Set if the model reads images with cross-attention layers instead of image tokens."""

    @property
    def embeddings_per_row(self) -> int:
        """Embeddings per row of the encoder cache. A row belongs to an image token, or to a tile in
        cross-attention models."""
        if self.cross is not None:
            return self.cross.embeddings_per_tile
        return 1 + self.num_deepstack_layers


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """Properties of a vision family that config.json lacks or may lack."""

    uses_mrope: bool = False
    whole_images: bool = False
    num_deepstack_layers: int = 0
    """Default if vision_config has no deepstack_visual_indexes."""
    has_cross_attention: bool = False
    image_token_id: int | None = None
    """Default of the image token id; None: config.json must have the id."""


VISION_FAMILIES: dict[str, VisionFamily] = {
    "AyaVisionForConditionalGeneration": VisionFamily(),
    "DeepseekVLForConditionalGeneration": VisionFamily(),
    "Gemma3ForConditionalGeneration": VisionFamily(whole_images=True),
    "Idefics3ForConditionalGeneration": VisionFamily(),
    "InternVLForConditionalGeneration": VisionFamily(),
    "Lfm2VlForConditionalGeneration": VisionFamily(),
    "Llama4ForConditionalGeneration": VisionFamily(),
    "LlavaForConditionalGeneration": VisionFamily(),
    "LlavaNextForConditionalGeneration": VisionFamily(),
    "Mistral3ForConditionalGeneration": VisionFamily(),
    "MiniMaxM3SparseForConditionalGeneration": VisionFamily(),
    "MllamaForConditionalGeneration": VisionFamily(has_cross_attention=True),
    "Phi4MultimodalForCausalLM": VisionFamily(image_token_id=200010),
    "Qwen2VLForConditionalGeneration": VisionFamily(uses_mrope=True),
    "Qwen2_5_VLForConditionalGeneration": VisionFamily(uses_mrope=True),
    "Qwen3_5ForConditionalGeneration": VisionFamily(uses_mrope=True),
    "Qwen3_5MoeForConditionalGeneration": VisionFamily(uses_mrope=True),
    "Qwen3VLForConditionalGeneration": VisionFamily(uses_mrope=True, num_deepstack_layers=3),
    "Qwen3VLMoeForConditionalGeneration": VisionFamily(uses_mrope=True, num_deepstack_layers=3),
    "SmolVLMForConditionalGeneration": VisionFamily(),
    "VipLlavaForConditionalGeneration": VisionFamily(),
}
"""Multimodal architecture -> its properties. Other architectures have UNKNOWN."""

UNKNOWN = VisionFamily()


MAX_IMAGE_ROWS = 16384
"""Embeddings of the largest image under the usual limits of image processors."""


MAX_CROSS_REQUESTS = 16
"""Maximum number of requests with images cached for cross-attention layers. Llama 3.2 Vision 11B
caches 210 MB per image."""


def encoder_cache_rows(max_model_len: int, max_num_batched_tokens: int) -> int:
    """Number of image embeddings that a worker caches: enough for the tokens of a step, and for an
    image of up to MAX_IMAGE_ROWS embeddings that fits the context."""
    return max(max_num_batched_tokens, min(max_model_len, MAX_IMAGE_ROWS))


def cross_cache_tiles(facts: CrossFacts, images_per_request: int, max_num_seqs: int) -> int:
    """Number of image tiles that a worker caches for cross-attention layers: the tiles of
    min(max_num_seqs, MAX_CROSS_REQUESTS) requests."""
    num_requests = min(max_num_seqs, MAX_CROSS_REQUESTS)
    return num_requests * images_per_request * facts.tiles_per_image


def read_vision(whole: Fields) -> VisionFacts | None:
    """Vision settings from the config.json of a multimodal model; None if the model is served
    without images, for example if it was saved without its vision tower. Raises ConfigError."""
    names = whole.raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        return None
    if not isinstance(names[0], str) or "vision_config" not in whole.raw:
        return None
    if names[0] not in VISION_FAMILIES and not is_unknown_whole(whole):
        return None
    family = VISION_FAMILIES.get(names[0], UNKNOWN)
    vision = Fields(whole.get("vision_config", dict, {}), whole.file)
    if family.image_token_id is not None:
        token_id = vision.count("image_token_id", family.image_token_id)
    else:
        old_name = "image_token_index"
        token_id = whole.count("image_token_id" if "image_token_id" in whole.raw else old_name)
    num_deepstack_layers = family.num_deepstack_layers
    if num_deepstack_layers and "deepstack_visual_indexes" in vision.raw:
        num_deepstack_layers = len(vision.numbers("deepstack_visual_indexes"))
    return VisionFacts(
        architecture=names[0],
        image_token_id=token_id,
        video_token_id=whole.get("video_token_id", int, None),
        uses_mrope=family.uses_mrope,
        whole_images=family.whole_images,
        num_deepstack_layers=num_deepstack_layers,
        is_unlisted=names[0] not in VISION_FAMILIES,
        cross=_cross_facts(vision) if family.has_cross_attention else None,
    )


def _cross_facts(vision: Fields) -> CrossFacts:
    """Tile settings of cross attention. A tile has an embedding per patch and a class embedding."""
    patches = vision.count("image_size", 448) // vision.count("patch_size", 14)
    return CrossFacts(vision.count("max_num_tiles", 4), patches**2 + 1)
