"""InternVL: a fixed number of image tokens per tile, between a start and an end token."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from server.multimodal.families.base import Arrays, MakeForm, NoGrid, ProcessorFiles


class InternVLForm(NoGrid):
    """Expands the single image token that the template writes."""

    # Published checkpoints have false in preprocessor_config.json, but their processor class passes
    # true.
    options: dict[str, Any] = {"crop_to_patches": True}  # noqa: RUF012 - never written

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.image_token
        self._start = files.token("start_image_token", "<img>")
        self._end = files.token("end_image_token", "</img>")
        self._count = files.count("image_seq_length", files.config.get("image_seq_length"), 256)

    def text(self, arrays: Arrays) -> str:
        num_tiles = int(np.ravel(arrays["num_patches"])[0])
        return f"{self._start}{self.mark * (self._count * num_tiles)}{self._end}"


FORMS: Mapping[str, MakeForm] = {
    "InternVLProcessor": InternVLForm,
    "internvl": InternVLForm,
}
