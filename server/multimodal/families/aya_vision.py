"""Aya Vision: the numbered tiles of a split image, then the whole image, with a fixed number of
image tokens each."""

from collections.abc import Mapping

import numpy as np

from server.multimodal.families.base import Arrays, MakeForm, NoGrid, ProcessorFiles
from server.multimodal.processor_fields import MAX_SIDE


class AyaVisionForm(NoGrid):
    """Prompt text of Aya Vision. The token that the template writes differs from the placeholder
    token of the embeddings."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.word("image_token", "<image>")
        patch = files.count("patch_size", 28) * files.count("downsample_factor", 1)
        count = files.count("img_size", 364, maximum=MAX_SIDE) // patch
        self._tokens = files.word("img_patch_token", files.image_token) * count**2
        self._start = files.word("start_of_img_token", "<|START_OF_IMG|>")
        self._end = files.word("end_of_img_token", "<|END_OF_IMG|>")
        self._tile = files.word("tile_token", "TILE")
        self._whole = files.word("tile_global_token", "TILE_GLOBAL")

    def text(self, arrays: Arrays) -> str:
        num_tiles = int(np.ravel(arrays["num_patches"])[0])
        tiles = "".join(f"{self._tile}_{number}{self._tokens}" for number in range(1, num_tiles))
        return f"{self._start}{tiles}{self._whole}{self._tokens}{self._end}"


FORMS: Mapping[str, MakeForm] = {
    "AyaVisionProcessor": AyaVisionForm,
    "aya_vision": AyaVisionForm,
}
