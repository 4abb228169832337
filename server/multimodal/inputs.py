"""ImageLoader: loads and preprocesses the images and videos of a request."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from config.errors import ConfigError, UserError
from config.model.multimodal.vision import VisionFacts
from config.server import ServerConfig
from server.multimodal.fetch import MediaFetcher
from server.multimodal.messages import IMAGE, VIDEO
from server.multimodal.parts import MediaSource, check_count
from server.multimodal.processor import ImagePreprocessor, ProcessedImage, image_processes
from server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class ImageLoader:
    """Reads and preprocesses the images and videos of requests. Used on a single event loop."""

    def __init__(
        self,
        vision: VisionFacts,
        preprocessor: ImagePreprocessor,
        fetcher: MediaFetcher,
        limits: Mapping[bytes, int],
    ) -> None:
        """`limits`: maximum number of images and of videos in a prompt, by kind."""
        self.token_ids = {vision.image_token_id}
        """Placeholder tokens of images and videos."""
        if vision.video_token_id is not None and VIDEO in preprocessor.marks:
            self.token_ids.add(vision.video_token_id)
        self.preprocessor = preprocessor
        self._fetcher = fetcher
        self._limits = limits

    @property
    def marks(self) -> Mapping[bytes, str]:
        """Kind -> text that the chat template writes for an image or video, for the supported
        kinds."""
        return self.preprocessor.marks

    async def load(
        self,
        sources: Sequence[MediaSource],
        *,
        owner: str = "",
        client: str = "",
        param: str = "messages",
    ) -> list[ProcessedImage]:
        """Load the images and videos, in order; equal sources are loaded once. An image or
        video that is given only by a uuid must have been sent by `owner` before and still be
        cached. Clients share fetches and processing fairly. Raises UserError, and the errors of
        MediaFetcher.fetch and ImagePreprocessor.process."""
        check_count(sources, self._limits, param)
        loading: dict[MediaSource, asyncio.Future[ProcessedImage]] = {}
        equal = [replace(source, where="") for source in sources]
        for same, source in zip(equal, sources, strict=True):
            if same not in loading:
                place = source.where if param == "messages" else param
                load = self._load(source, owner, client, place)
                loading[same] = asyncio.ensure_future(load)
        try:
            await asyncio.gather(*loading.values())
            return [loading[same].result() for same in equal]
        finally:
            for task in loading.values():
                task.cancel()

    async def _load(
        self, source: MediaSource, owner: str, client: str, param: str
    ) -> ProcessedImage:
        kind = source.kind
        if kind not in self.marks:
            raise UserError(
                f"{source.where} is a video, this model takes text and images", param=param
            )
        if source.data is None and not source.url:
            found = self.preprocessor.named(owner, source.uuid, kind)
            if found is None:
                raise UserError(
                    f"{source.where} has only a uuid, and this server has no image or video with "
                    "this uuid: send it again with its url",
                    param=param,
                )
            return found
        data = source.data
        if data is None:
            data = await self._fetcher.fetch(source.url, source.where, param, kind, client=client)
        image = await self.preprocessor.process(data, source.where, param, kind, client=client)
        if source.uuid:
            self.preprocessor.remember(owner, source.uuid, image.digest, kind)
        return image

    def close(self) -> None:
        """Stop the processes; safe to call twice."""
        self.preprocessor.close()


def make_image_inputs(
    folder: str, vision: VisionFacts, config: ServerConfig, tokenizer: Tokenizer
) -> ImageLoader | None:
    """Create the ImageLoader of a checkpoint, and protect the image tokens and placeholders in
    `tokenizer`, so that text in messages is never tokenized to them. Blocks for seconds.

    Returns None if limit_mm_per_prompt allows no images, and allows no videos or the model has no
    video token: the checkpoint then needs no processor. Also returns None, and logs a warning, if
    the model is unlisted and its transformers processor cannot be used; the tokens are not
    protected then. Raises ConfigError.
    """
    image_token = tokenizer.token(vision.image_token_id)
    video_token = ""
    if vision.video_token_id is not None:
        video_token = tokenizer.token(vision.video_token_id) or ""
    if not (config.max_images or (video_token and config.max_videos)):
        tokenizer.protect({token for token in (image_token, video_token) if token})
        return None
    if image_token is None:
        raise ConfigError(
            f"the image token of {folder} is {vision.image_token_id}, it must be below the "
            f"vocabulary size of its tokenizer, {tokenizer.vocab_size}"
        )
    preprocessor = ImagePreprocessor(
        image_processes(
            folder,
            image_token,
            config.image_options,
            video_token=video_token,
            video_frames=config.video_frames,
            is_unlisted=vision.is_unlisted,
        ),
        image_token,
        cache_bytes=int(config.mm_processor_cache_gb * 2**30),
        video_token=video_token,
    )
    try:
        preprocessor.open()
    except ConfigError as error:
        preprocessor.close()
        if not vision.is_unlisted:
            raise
        logger.warning("Images are not served: %s", error)
        return None
    tokenizer.protect({image_token, video_token or image_token, *preprocessor.marks.values()})
    fetcher = MediaFetcher(
        config.allowed_media_domains,
        config.allowed_local_media_path,
        timeout_s=config.image_fetch_timeout_s,
        video_timeout_s=config.video_fetch_timeout_s,
    )
    limits = {IMAGE: config.max_images, VIDEO: config.max_videos}
    return ImageLoader(vision, preprocessor, fetcher, limits)
