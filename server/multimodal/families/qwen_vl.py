"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL: an image token for each square of merged patches."""

from typing import Any

import numpy as np

from server.multimodal.families.base import Arrays, ProcessorFiles, VideoForm

WITH_VIDEOS = ("qwen2_vl", "qwen2_5_vl")
"""model_type of those that take a video as one item. Later ones write the time of each frame into
the prompt."""


class QwenVLForm:
    """The template writes the start and the end of the image itself."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.image_token
        self.options: dict[str, Any] = {}
        self._merge = files.value("merge_size", files.vision.get("spatial_merge_size"))
        self.video: VideoForm | None = None
        if files.video_token and files.config.get("model_type") in WITH_VIDEOS:
            self.video = QwenVideoForm(files, self)

    def text(self, arrays: Arrays) -> str:
        time, height, width = self.grid(arrays)
        return self.mark * (time * height * width)

    def grid(self, arrays: Arrays) -> tuple[int, int, int]:
        time, height, width = (int(length) for length in arrays["image_grid_thw"][0])
        return time, height // self._merge, width // self._merge


class QwenVideoForm:
    """A patch of a video is of several frames, two in all checkpoints."""

    def __init__(self, files: ProcessorFiles, images: QwenVLForm) -> None:
        self.mark = files.video_token
        self._images = images
        self._depth: int = files.value(
            "temporal_patch_size", files.vision.get("temporal_patch_size"), 2
        )
        self._rate: float | None = None
        if files.config["model_type"] == "qwen2_5_vl":
            self._rate = files.vision.get("tokens_per_second", 4)

    def joined(self, arrays: Arrays) -> Arrays:
        grid = np.asarray(arrays["image_grid_thw"])
        num_frames, (_, height, width) = len(grid), grid[0].tolist()
        # The image processor repeats each frame for all places in the depth of a patch.
        patches = np.asarray(arrays["pixel_values"]).reshape(
            num_frames, height * width, 3, self._depth, -1
        )[:, :, :, 0]
        missing = -num_frames % self._depth
        patches = np.concatenate([patches, *[patches[-1:]] * missing])
        time = len(patches) // self._depth
        patches = patches.reshape(time, self._depth, *patches.shape[1:])
        patches = patches.transpose(0, 2, 3, 1, 4)
        return {
            "pixel_values": patches.reshape(time * height * width, -1),
            "image_grid_thw": np.array([[time, height, width]], np.int64),
        }

    def text(self, arrays: Arrays) -> str:
        return self.mark * int(np.prod(self._images.grid(arrays)))

    def time_step(self, fps: float) -> float:
        """Qwen2.5-VL counts seconds, Qwen2-VL patches."""
        if self._rate is None:
            return 1.0
        # In the precision of transformers, which rounds the products down.
        return float(np.float32(self._depth / fps) * np.float32(self._rate))
