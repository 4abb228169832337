"""DeepSeek-VL: a fixed number of image tokens per image."""

from collections.abc import Mapping

from server.multimodal.families.base import Arrays, MakeForm, NoGrid, ProcessorFiles


class DeepseekVLForm(NoGrid):
    """Expands the single image token that the template writes."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.image_token
        self._text: str = self.mark * files.count("num_image_tokens", 576)

    def text(self, arrays: Arrays) -> str:
        return self._text


FORMS: Mapping[str, MakeForm] = {
    "DeepseekVLProcessor": DeepseekVLForm,
    "deepseek_vl": DeepseekVLForm,
}
