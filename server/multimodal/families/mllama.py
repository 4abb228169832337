"""Llama 3.2 Vision: one token per image; cross-attention layers read its tiles."""

from collections.abc import Mapping

import numpy as np

from server.multimodal.families.base import Arrays, MakeForm, NoGrid, ProcessorFiles


class MllamaForm(NoGrid):
    """Keeps the single image token that the template writes."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.image_token

    def text(self, arrays: Arrays) -> str:
        return self.mark

    def num_rows(self, arrays: Arrays) -> int:
        """Number of tiles, including padding."""
        return int(np.shape(arrays["aspect_ratio_mask"])[-1])


FORMS: Mapping[str, MakeForm] = {
    "MllamaProcessor": MllamaForm,
    "mllama": MllamaForm,
}
