"""Phi-4-multimodal: an image token per embedding, including the embeddings of row ends."""

from collections.abc import Mapping

from server.multimodal.families.base import Arrays, MakeForm, NoGrid, ProcessorFiles


class Phi4Form(NoGrid):
    """Expands the single image token that the template writes."""

    def __init__(self, files: ProcessorFiles) -> None:
        self.mark = files.image_token

    def text(self, arrays: Arrays) -> str:
        return self.mark * int(arrays["num_img_tokens"][0])


FORMS: Mapping[str, MakeForm] = {
    "Phi4MultimodalProcessor": Phi4Form,
    "phi4_multimodal": Phi4Form,
}
