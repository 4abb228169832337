"""Gemma 3: a fixed number of image tokens for the image and for each of its crops."""

from collections.abc import Mapping
from typing import Any

from server.multimodal.families.base import Arrays, MakeForm, NoGrid, ProcessorFiles


class Gemma3Form(NoGrid):
    """Expands the start token, which is all that the template writes for an image."""

    # Published checkpoints have null for these arguments.
    options: dict[str, Any] = {  # noqa: RUF012 - never written
        "do_convert_rgb": True,
        "do_pan_and_scan": False,
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.token("boi_token", "<start_of_image>")
        end = files.token("eoi_token", "<end_of_image>")
        count = files.count("image_seq_length", files.config.get("mm_tokens_per_image"), 256)
        self._whole = f"\n\n{self.mark}{files.image_token * count}{end}\n\n"

    def text(self, arrays: Arrays) -> str:
        num_crops = int(arrays["num_crops"][0])
        if not num_crops:
            return self._whole
        crops = " ".join([self._whole] * num_crops)
        return (
            f"Here is the original image {self._whole} and here are some crops to help you see "
            f"better {crops}"
        )


FORMS: Mapping[str, MakeForm] = {
    "Gemma3Processor": Gemma3Form,
    "gemma3": Gemma3Form,
}
