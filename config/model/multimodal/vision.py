"""Facts of a model that takes images, as its config.json states them."""

from dataclasses import dataclass

from config.model.json_fields import Fields


@dataclass(frozen=True, slots=True)
class VisionFacts:
    """What server, engine and worker have to agree on about images."""

    architecture: str
    """Of the whole model: LlavaForConditionalGeneration."""
    model_type: str
    """Of the whole model: llava."""
    image_token_id: int
    """Each token with this id takes one row of an image's embeddings."""
    video_token_id: int | None = None
    uses_mrope: bool = False
    """Positions have three axes: time, height and width."""
    whole_images: bool = False
    """The tokens of an image see each other in both directions, so that one chunk of a prefill must
    hold the rest of an image."""
    num_deepstack_layers: int = 0
    """An image has so many further embeddings for each of its tokens, which are added to the
    outputs of the first layers (Meng et al., DeepStack, 2024)."""

    @property
    def embeddings_per_token(self) -> int:
        """Of an image."""
        return 1 + self.num_deepstack_layers


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """What config.json does not say."""

    uses_mrope: bool = False
    whole_images: bool = False
    num_deepstack_layers: int = 0
    """Unless vision_config names them."""


VISION_FAMILIES: dict[str, VisionFamily] = {
    "AyaVisionForConditionalGeneration": VisionFamily(),
    "DeepseekVLForConditionalGeneration": VisionFamily(),
    "Gemma3ForConditionalGeneration": VisionFamily(whole_images=True),
    "Idefics3ForConditionalGeneration": VisionFamily(),
    "InternVLForConditionalGeneration": VisionFamily(),
    "Llama4ForConditionalGeneration": VisionFamily(),
    "LlavaForConditionalGeneration": VisionFamily(),
    "LlavaNextForConditionalGeneration": VisionFamily(),
    "Mistral3ForConditionalGeneration": VisionFamily(),
    "Qwen2VLForConditionalGeneration": VisionFamily(uses_mrope=True),
    "Qwen2_5_VLForConditionalGeneration": VisionFamily(uses_mrope=True),
    "Qwen3VLForConditionalGeneration": VisionFamily(uses_mrope=True, num_deepstack_layers=3),
    "Qwen3VLMoeForConditionalGeneration": VisionFamily(uses_mrope=True, num_deepstack_layers=3),
    "SmolVLMForConditionalGeneration": VisionFamily(),
    "VipLlavaForConditionalGeneration": VisionFamily(),
}
"""Architecture of a whole model -> its facts. Models that are not listed are served without
images."""


MAX_IMAGE_ROWS = 16384
"""Embeddings of the largest image, at the limits that image processors usually have."""


def encoder_cache_rows(max_model_len: int, max_num_batched_tokens: int) -> int:
    """Embeddings of images that a worker keeps: those of a step's tokens, and of the largest image
    that a context holds."""
    return max(max_num_batched_tokens, min(max_model_len, MAX_IMAGE_ROWS))


def read_vision(whole: Fields) -> VisionFacts | None:
    """The facts in the config.json of a whole model; None if it is served without images, as one
    that was saved without its vision tower. ConfigError for a missing or wrong field."""
    names = whole.raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        return None
    family = VISION_FAMILIES.get(names[0]) if isinstance(names[0], str) else None
    if family is None or "vision_config" not in whole.raw:
        return None
    old_name = "image_token_index"
    token_id = whole.count("image_token_id" if "image_token_id" in whole.raw else old_name)
    vision = Fields(whole.get("vision_config", dict, {}), whole.file)
    num_deepstack_layers = family.num_deepstack_layers
    if "deepstack_visual_indexes" in vision.raw:
        num_deepstack_layers = len(vision.numbers("deepstack_visual_indexes"))
    return VisionFacts(
        architecture=names[0],
        model_type=whole.get("model_type", str, ""),
        image_token_id=token_id,
        video_token_id=whole.get("video_token_id", int, None),
        uses_mrope=family.uses_mrope,
        whole_images=family.whole_images,
        num_deepstack_layers=num_deepstack_layers,
    )
