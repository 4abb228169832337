"""Facts of a model that takes images, as its config.json states them."""

from dataclasses import dataclass

from config.model.json_fields import Fields
from config.model.multimodal.text_part import is_unknown_whole


@dataclass(frozen=True, slots=True)
class CrossFacts:
    """Images of a model with cross-attention layers. In the prompt, an image is a single token. The
    image has a fixed number of tiles; the last tiles may be padding."""

    tiles_per_image: int
    embeddings_per_tile: int


@dataclass(frozen=True, slots=True)
class VisionFacts:
    """What server, engine and worker must agree on about images."""

    architecture: str
    """Architecture of the whole model, such as LlavaForConditionalGeneration."""
    image_token_id: int
    """Each token with this id takes a row of an image's embeddings."""
    video_token_id: int | None = None
    uses_mrope: bool = False
    """Positions have three axes: time, height and width."""
    whole_images: bool = False
    """Whether attention between the tokens of an image is bidirectional, so that a prefill chunk
    must hold all remaining tokens of an image."""
    is_unlisted: bool = False
    """Whether the architecture is not in VISION_FAMILIES. transformers' processor then writes the
    image prompts, and a check of transformers' code shows whether the images can be served."""
    num_deepstack_layers: int = 0
    """Number of further embeddings per image token, which are added to the outputs of the first
    layers (Meng et al., DeepStack, 2024)."""

    cross: CrossFacts | None = None
    """Set if cross-attention layers read the images, in place of image tokens."""

    @property
    def embeddings_per_row(self) -> int:
        """Embeddings in a row of the encoder cache. A row is an image token, or a tile for
        cross-attention models."""
        if self.cross is not None:
            return self.cross.embeddings_per_tile
        return 1 + self.num_deepstack_layers


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """Facts that config.json does not have."""

    uses_mrope: bool = False
    whole_images: bool = False
    num_deepstack_layers: int = 0
    """Default, if vision_config does not set the number."""
    has_cross_attention: bool = False
    image_token_id: int | None = None
    """Default of the image token id in vision_config; None: config.json has the id."""


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
"""Architecture of a whole model -> facts. For other architectures only the field names are
known."""

UNKNOWN = VisionFamily()


MAX_IMAGE_ROWS = 16384
"""Embeddings of the largest image under the usual limits of image processors."""


MAX_CROSS_REQUESTS = 16
"""Maximum number of requests whose images are cached for cross-attention layers. Llama 3.2 Vision
11B caches 210 MB per image."""


def encoder_cache_rows(max_model_len: int, max_num_batched_tokens: int) -> int:
    """Image embeddings that a worker keeps: enough for the tokens of a step and for the largest
    image that fits the context."""
    return max(max_num_batched_tokens, min(max_model_len, MAX_IMAGE_ROWS))


def cross_cache_tiles(facts: CrossFacts, images_per_request: int, max_num_seqs: int) -> int:
    """Image tiles that a worker keeps for cross-attention layers: the tiles of min(max_num_seqs,
    MAX_CROSS_REQUESTS) requests."""
    num_requests = min(max_num_seqs, MAX_CROSS_REQUESTS)
    return num_requests * images_per_request * facts.tiles_per_image


def read_vision(whole: Fields) -> VisionFacts | None:
    """Vision facts from the config.json of a whole model; None if the model is served without
    images, for example if it was saved without its vision tower. Raises ConfigError for a missing
    or wrong field."""
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
    """Tile facts of cross attention: each patch of a tile gives an embedding, and the tile as a
    whole gives a further embedding."""
    patches = vision.count("image_size", 448) // vision.count("patch_size", 14)
    return CrossFacts(vision.count("max_num_tiles", 4), patches**2 + 1)
