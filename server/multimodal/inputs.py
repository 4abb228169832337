"""ImageInputs: from the images of a request to what its prompt needs."""

import asyncio
from collections.abc import Sequence

from config.errors import ConfigError, UserError
from config.model.multimodal.vision import VisionFacts
from config.server import ServerConfig
from server.multimodal.fetch import MediaFetcher
from server.multimodal.parts import ImageSource, check_count
from server.multimodal.processor import ImagePreprocessor, ProcessedImage, image_processes
from server.text.tokenizer import Tokenizer

MAX_FETCHES = 16
"""At once, of all requests."""


class ImageInputs:
    """Reads and preprocesses the images of requests. For one event loop."""

    def __init__(
        self,
        vision: VisionFacts,
        preprocessor: ImagePreprocessor,
        fetcher: MediaFetcher,
        max_images: int,
    ) -> None:
        self.image_token_id = vision.image_token_id
        self.preprocessor = preprocessor
        self._fetcher = fetcher
        self._max_images = max_images
        self._fetches = asyncio.Semaphore(MAX_FETCHES)

    @property
    def mark(self) -> str:
        """What the chat template writes for an image."""
        return self.preprocessor.mark

    async def load(
        self, sources: Sequence[ImageSource], *, owner: str = "", param: str = "messages"
    ) -> list[ProcessedImage]:
        """The images, in their order. `owner` sent those that are given by a uuid alone. Raises
        UserError and Overloaded."""
        check_count(sources, self._max_images, param)
        loading = [asyncio.ensure_future(self._load(one, owner, param)) for one in sources]
        try:
            return list(await asyncio.gather(*loading))
        finally:
            for one in loading:
                one.cancel()

    async def _load(self, source: ImageSource, owner: str, param: str) -> ProcessedImage:
        if source.data is None and not source.url:
            found = self.preprocessor.named(owner, source.uuid)
            if found is None:
                raise UserError(
                    f"{source.where} has only a uuid, and this server keeps no image of that name: "
                    "send it again with its url",
                    param=param,
                )
            return found
        data = source.data
        if data is None:
            async with self._fetches:
                data = await self._fetcher.fetch(source.url, source.where, param)
        image = await self.preprocessor.process(data, source.where, param)
        if source.uuid:
            self.preprocessor.remember(owner, source.uuid, image.digest)
        return image

    def close(self) -> None:
        """Stop the processes; safe to call twice."""
        self.preprocessor.close()


def make_image_inputs(
    folder: str, vision: VisionFacts, config: ServerConfig, tokenizer: Tokenizer
) -> ImageInputs:
    """Those of a checkpoint. Texts of messages cannot become images afterwards. Blocks for seconds.
    Raises ConfigError."""
    image_token = tokenizer.token(vision.image_token_id)
    if image_token is None:
        raise ConfigError(
            f"the image token of {folder} is {vision.image_token_id}, its tokenizer has "
            f"{tokenizer.vocab_size} tokens"
        )
    preprocessor = ImagePreprocessor(
        image_processes(folder, image_token, config.image_options),
        image_token,
        cache_bytes=int(config.mm_processor_cache_gb * 2**30),
    )
    try:
        preprocessor.open()
    except ConfigError:
        preprocessor.close()
        raise
    protected = {image_token, preprocessor.mark}
    if vision.video_token_id is not None:
        protected.add(tokenizer.token(vision.video_token_id) or image_token)
    tokenizer.protect(protected)
    fetcher = MediaFetcher(
        config.allowed_media_domains,
        config.allowed_local_media_path,
        timeout_s=config.image_fetch_timeout_s,
    )
    return ImageInputs(vision, preprocessor, fetcher, config.max_images)
