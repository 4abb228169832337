"""LLaVA: an image token per embedding of the vision tower. LLaVA-NeXT: image tokens for the
embeddings of the whole image, for the unpadded patches of its tiles, and for the end of each row of
these patches."""

from collections.abc import Mapping
from typing import Any

from transformers.image_processing_utils import select_best_resolution

from config.errors import ConfigError
from config.model.json_fields import shown
from server.multimodal.families.base import Arrays, MakeForm, NoGrid, ProcessorFiles, image_size
from server.multimodal.processor_fields import MAX_IMAGE_TOKENS, MAX_SIDE, processor_fields

MAX_CANVASES = 1_024


class LlavaForm(NoGrid):
    """Prompt text of llava and vipllava."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.word("image_token", files.image_token)
        self._token = files.image_token
        self._patch = files.count("patch_size", files.vision.get("patch_size"))
        strategy = files.word(
            "vision_feature_select_strategy",
            files.config.get("vision_feature_select_strategy"),
            "default",
        )
        # The strategy "default" drops CLIP's class token, which num_additional_image_tokens
        # includes. Without this field, only the patches have tokens.
        dropped = int(strategy == "default")
        extra = processor_fields(files.processor).integer(
            "num_additional_image_tokens", dropped, maximum=MAX_IMAGE_TOKENS
        )
        self._extra = extra - dropped

    def text(self, arrays: Arrays) -> str:
        height, width = image_size(arrays)
        return self._token * (self._num_patches(height, width) + self._extra)

    def _num_patches(self, height: int, width: int) -> int:
        count: int = (height // self._patch) * (width // self._patch)
        return count


class LlavaNextForm(LlavaForm):
    """Prompt text of llava_next (AnyRes tiles)."""

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self._sizes = _sizes(
            files.value("image_grid_pinpoints", files.config.get("image_grid_pinpoints"))
        )

    def text(self, arrays: Arrays) -> str:
        size = tuple(int(length) for length in arrays["image_sizes"][0])
        height, width = image_size(arrays)
        best_height, best_width = select_best_resolution(size, self._sizes)
        rows = height // self._patch * (best_height // height)
        columns = width // self._patch * (best_width // width)
        rows, columns = _without_padding(size[0], size[1], rows, columns)
        base = self._num_patches(height, width) + self._extra
        # The end of each row has an embedding.
        return self._token * (base + rows * columns + rows)


def _sizes(pinpoints: object) -> list[list[int]]:
    """(height, width) of the possible tile canvases. Raises ConfigError."""
    pairs: list[Any] = pinpoints if isinstance(pinpoints, list) else []
    if not 1 <= len(pairs) <= MAX_CANVASES:
        pairs = [None]
    for pair in pairs:
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and all(type(length) is int and 1 <= length <= MAX_SIDE for length in pair)
        ):
            raise ConfigError(
                f"image_grid_pinpoints of the checkpoint's processor is {shown(pinpoints)}, it "
                f"must have 1 to {MAX_CANVASES} pairs of a height and a width of 1 to {MAX_SIDE}"
            )
    return pairs


def _without_padding(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of patches without padding."""
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        return rows - (rows - kept) // 2 * 2, columns
    kept = int(round(width * (rows / height), 7))
    return rows, columns - (columns - kept) // 2 * 2


FORMS: Mapping[str, MakeForm] = {
    **dict.fromkeys(("LlavaProcessor", "llava", "vipllava"), LlavaForm),
    "LlavaNextProcessor": LlavaNextForm,
    "llava_next": LlavaNextForm,
}
