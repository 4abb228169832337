"""Qwen2-VL, 2.5-VL, 3-VL, Qwen3.5 and MiniMax-M3: an image token per square of merged patches."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from server.multimodal.families.base import Arrays, MakeForm, NoGrid, ProcessorFiles, VideoForm

MAX_SIDES = 200
"""Maximum aspect ratio of a frame."""


class QwenVLForm:
    """Expands the image token; the template also writes the start and end tokens around it."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.image_token
        self.options: dict[str, Any] = {}
        self.merge = files.count("merge_size", files.vision.get("spatial_merge_size"))
        self.video: VideoForm | None = None
        if files.video_token:
            is_timed = str(files.config.get("model_type")).startswith(("qwen3_vl", "qwen3_5"))
            self.video = (TimedVideoForm if is_timed else QwenVideoForm)(files, self)

    def text(self, arrays: Arrays) -> str:
        time, height, width = self.grid(arrays)
        return self.mark * (time * height * width)

    def grid(self, arrays: Arrays) -> tuple[int, int, int]:
        time, height, width = (int(length) for length in arrays["image_grid_thw"][0])
        return time, height // self.merge, width // self.merge

    def num_rows(self, arrays: Arrays) -> int:
        return 0


class MiniMaxM3Form(NoGrid):
    """Replaces the single image token that the template writes, and adds start and end texts."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.image_token
        merge = files.value("merge_size", files.vision.get("spatial_merge_size"), 2)
        self._merged = merge**2

    def text(self, arrays: Arrays) -> str:
        count = int(np.prod(arrays["image_grid_thw"][0])) // self._merged
        return f"]<]start of image[>[{self.mark * count}]<]end of image[>["


class QwenVideoForm:
    """Video of Qwen2-VL and Qwen2.5-VL. A video patch spans temporal_patch_size frames (2 in all
    published checkpoints)."""

    def __init__(self, files: ProcessorFiles, images: QwenVLForm) -> None:
        self.mark = self._token = files.video_token
        self._images = images
        self._depth: int = files.count(
            "temporal_patch_size", files.vision.get("temporal_patch_size"), 2
        )
        self._rate: float | None = None
        if files.config.get("model_type") == "qwen2_5_vl":
            self._rate = files.number("tokens_per_second", files.vision.get("tokens_per_second"), 4)

    def frame_size(
        self, count: int, height: int, width: int, size: Mapping[str, int]
    ) -> tuple[int, int] | None:
        return None

    def joined(self, arrays: Arrays) -> Arrays:
        grid = np.asarray(arrays["image_grid_thw"])
        num_frames, (_, height, width) = len(grid), grid[0].tolist()
        # The image processor fills all temporal_patch_size frames of a patch with the same frame:
        # take a single copy.
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

    def text(self, arrays: Arrays, times: Sequence[float]) -> str:
        return self._token * int(np.prod(self._images.grid(arrays)))

    def time_step(self, fps: float) -> float:
        """Position step per temporal patch: 1 for Qwen2-VL; proportional to time for Qwen2.5-VL."""
        if self._rate is None:
            return 1.0
        # float32 as in transformers, which rounds the products down.
        return float(np.float32(self._depth / fps) * np.float32(self._rate))


class TimedVideoForm(QwenVideoForm):
    """Video of Qwen3-VL and Qwen3.5: the prompt has a timestamp for each temporal patch, and the
    pixel limit applies to all frames together."""

    def __init__(self, files: ProcessorFiles, images: QwenVLForm) -> None:
        super().__init__(files, images)
        self._start = files.token("vision_start_token", "<|vision_start|>")
        self._end = files.token("vision_end_token", "<|vision_end|>")
        # The template writes start, token and end; `text` writes a start and an end per timestamp.
        self.mark = self._start + self._token + self._end
        patch: int = files.count("patch_size", files.vision.get("patch_size"), 16)
        self._factor = patch * images.merge
        self._default_size = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}

    def frame_size(
        self, count: int, height: int, width: int, size: Mapping[str, int]
    ) -> tuple[int, int] | None:
        """Size according to `smart_resize` in the Qwen3-VL video processor of transformers. Raises
        ValueError for an aspect ratio above MAX_SIDES."""
        bounds = {**self._default_size, **size}
        factor, count = self._factor, max(count, self._depth)
        smallest = min(height, width)
        if smallest < factor:
            height, width = height * factor // smallest, width * factor // smallest
        if max(height, width) > MAX_SIDES * min(height, width):
            raise ValueError(f"one side is more than {MAX_SIDES} times the other")
        rounded = [round(side / factor) * factor for side in (height, width)]
        pixels = round(count / self._depth) * self._depth * rounded[0] * rounded[1]
        if pixels > bounds["longest_edge"]:
            scale = math.sqrt(count * height * width / bounds["longest_edge"])
            rounded = [
                max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)
            ]
        elif pixels < bounds["shortest_edge"]:
            scale = math.sqrt(bounds["shortest_edge"] / (count * height * width))
            rounded = [math.ceil(side * scale / factor) * factor for side in (height, width)]
        return rounded[0], rounded[1]

    def text(self, arrays: Arrays, times: Sequence[float]) -> str:
        """Timestamps and video tokens; a timestamp is the mean time of a patch's first and last
        frame."""
        time, height, width = self._images.grid(arrays)
        known = [*times, *[times[-1]] * (time * self._depth - len(times))]
        tokens = self._token * (height * width)
        pieces = []
        for first in range(0, len(known), self._depth):
            middle = (known[first] + known[first + self._depth - 1]) / 2
            pieces.append(f"<{middle:.1f} seconds>{self._start}{tokens}{self._end}")
        return "".join(pieces)


FORMS: Mapping[str, MakeForm] = {
    **dict.fromkeys(("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"), QwenVLForm),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), QwenVLForm),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), QwenVLForm),
    "MiniMaxM3VLProcessor": MiniMaxM3Form,
    "minimax_m3_vl": MiniMaxM3Form,
}
