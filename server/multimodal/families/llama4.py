"""Llama 4: the tiles of a large image in rows and columns with separator tokens, then the whole
image."""

from collections.abc import Mapping

from server.multimodal.families.base import Arrays, MakeForm, NoGrid, ProcessorFiles, image_size


class Llama4Form(NoGrid):
    """The template writes <|image|>; the placeholder token of the embeddings is <|patch|>."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.word("fake_image_token", "<|image|>")
        self._image = files.word("image_token", "<|image|>")
        self._token = files.image_token
        self._start = files.word("start_of_image_token", "<|image_start|>")
        self._end = files.word("end_of_image_token", "<|image_end|>")
        self._column = files.word("tile_x_separator_token", "<|tile_x_separator|>")
        self._row = files.word("tile_y_separator_token", "<|tile_y_separator|>")
        self._patch = files.count("patch_size", files.vision.get("patch_size"), 14)
        ratio = files.number("pixel_shuffle_ratio", files.vision.get("pixel_shuffle_ratio"), 0.5)
        self._shuffled = round(1 / ratio**2)

    def text(self, arrays: Arrays) -> str:
        height, width = image_size(arrays)
        count = (height // self._patch) * (width // self._patch) // self._shuffled
        tile = self._token * count
        rows, columns = (int(length) for length in arrays["aspect_ratios"][0])
        tiles = ""
        if rows * columns > 1:
            tiles = (self._column.join([tile] * columns) + self._row) * rows
        return f"{self._start}{tiles}{self._image}{tile}{self._end}"


FORMS: Mapping[str, MakeForm] = {
    "Llama4Processor": Llama4Form,
    "llama4": Llama4Form,
}
