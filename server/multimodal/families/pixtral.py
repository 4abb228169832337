"""Pixtral and Mistral 3: rows of image tokens, with a token at the end of each row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.model.json_fields import Fields
from server.multimodal.families.base import Arrays, MakeForm, NoGrid, ProcessorFiles


class PixtralForm(NoGrid):
    """Form of Pixtral, Mistral 3, and LLaVA with Pixtral's vision tower."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.image_token
        self._break: str = files.word("image_break_token", "[IMG_BREAK]")
        self._end = files.word("image_end_token", "[IMG_END]")
        patch = files.value("patch_size", files.vision.get("patch_size"))
        if isinstance(patch, dict):
            # preprocessor_config.json has an object with height and width.
            patch = Fields(patch, Path("patch_size of the processor")).count("height")
        else:
            patch = files.count("patch_size", files.vision.get("patch_size"))
        merge = files.count("spatial_merge_size", files.config.get("spatial_merge_size"), 1)
        self._patch = patch * merge
        self.options: dict[str, Any] = {"patch_size": self._patch}

    def text(self, arrays: Arrays) -> str:
        height, width = (int(length) for length in arrays["image_sizes"][0])
        row = self.mark * (width // self._patch)
        return self._break.join([row] * (height // self._patch)) + str(self._end)


FORMS: Mapping[str, MakeForm] = {
    **dict.fromkeys(("PixtralProcessor", "pixtral", "mistral3"), PixtralForm),
}
