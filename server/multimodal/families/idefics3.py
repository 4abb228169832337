"""Idefics 3 and SmolVLM: the tiles of a split image in rows and columns, then the whole image."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from server.multimodal.families.base import Arrays, MakeForm, NoGrid, ProcessorFiles


class Idefics3Form(NoGrid):
    """A token with row and column, then a fixed number of image tokens, for each tile."""

    options: dict[str, Any] = {"return_row_col_info": True}  # noqa: RUF012 - never written

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.image_token
        count = files.count("image_seq_len", 169)
        self._tokens = self.mark * count
        self._around = files.token("fake_image_token", "<fake_token_around_image>")
        self._global = files.token("global_image_token", "<global-img>")

    def text(self, arrays: Arrays) -> str:
        rows, columns = (int(np.ravel(arrays[name])[0]) for name in ("rows", "cols"))
        whole = f"{self._around}{self._global}{self._tokens}{self._around}"
        if not rows and not columns:
            return whole
        lines = (
            "".join(
                f"{self._around}<row_{row + 1}_col_{column + 1}>{self._tokens}"
                for column in range(columns)
            )
            for row in range(rows)
        )
        return "".join(f"{line}\n" for line in lines) + f"\n{whole}"


FORMS: Mapping[str, MakeForm] = {
    **dict.fromkeys(("Idefics3Processor", "SmolVLMProcessor", "idefics3", "smolvlm"), Idefics3Form),
}
