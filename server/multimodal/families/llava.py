"""LLaVA: an image token per patch. LLaVA-NeXT: an image token per patch of the whole image, per
patch of its tiles without padding, and per end of a row of patches."""

from transformers.image_processing_utils import select_best_resolution

from server.multimodal.families.base import Arrays, NoGrid, ProcessorFiles, image_size


class LlavaForm(NoGrid):
    """llava, vipllava."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.processor.get("image_token") or files.image_token
        self._token = files.image_token
        self._patch = files.value("patch_size", files.vision.get("patch_size"))
        strategy = files.value(
            "vision_feature_select_strategy",
            files.config.get("vision_feature_select_strategy"),
            "default",
        )
        # The class token of CLIP, which the strategy "default" drops. Checkpoints without
        # num_additional_image_tokens also count it.
        extra = files.processor.get("num_additional_image_tokens")
        is_default = strategy == "default"
        self._extra = (1 if is_default else 0) if extra is None else extra
        self._extra -= 1 if is_default else 0

    def text(self, arrays: Arrays) -> str:
        height, width = image_size(arrays)
        return self._token * (self._num_patches(height, width) + self._extra)

    def _num_patches(self, height: int, width: int) -> int:
        count: int = (height // self._patch) * (width // self._patch)
        return count


class LlavaNextForm(LlavaForm):
    """llava_next ("any resolution" in its paper)."""

    def __init__(self, files: ProcessorFiles) -> None:
        super().__init__(files)
        self._sizes = files.value("image_grid_pinpoints", files.config.get("image_grid_pinpoints"))

    def text(self, arrays: Arrays) -> str:
        size = tuple(int(length) for length in arrays["image_sizes"][0])
        height, width = image_size(arrays)
        best_height, best_width = select_best_resolution(size, self._sizes)
        rows = height // self._patch * (best_height // height)
        columns = width // self._patch * (best_width // width)
        rows, columns = _without_padding(size[0], size[1], rows, columns)
        base = self._num_patches(height, width) + self._extra
        # The end of each row has its own embedding.
        return self._token * (base + rows * columns + rows)


def _without_padding(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of patches without padding."""
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        return rows - (rows - kept) // 2 * 2, columns
    kept = int(round(width * (rows / height), 7))
    return rows, columns - (columns - kept) // 2 * 2
