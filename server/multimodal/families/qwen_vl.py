"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL: an image token for each square of merged patches."""

from typing import Any

from server.multimodal.families.base import Arrays, ProcessorFiles


class QwenVLForm:
    """The template writes the start and the end of the image itself."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.image_token
        self.options: dict[str, Any] = {}
        self._merge = files.value("merge_size", files.vision.get("spatial_merge_size"))

    def text(self, arrays: Arrays) -> str:
        time, height, width = self.grid(arrays)
        return self.mark * (time * height * width)

    def grid(self, arrays: Arrays) -> tuple[int, int, int]:
        time, height, width = (int(length) for length in arrays["image_grid_thw"][0])
        return time, height // self._merge, width // self._merge
