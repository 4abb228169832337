"""PromptReader: makes the prompts of an LLM from texts, token ids, conversations and images."""

from config.errors import UserError
from config.model.model_config import ModelConfig
from config.params.sampling import SamplingParams
from config.server import ServerConfig
from server.generation.outputs import Prompt
from server.generation.validation import truncate_prompt
from server.multimodal.inputs import ImageLoader, make_image_inputs
from server.multimodal.parts import MediaSource, in_order_of_marks, place_images, with_image_texts
from server.multimodal.processor import ProcessedImage
from server.text.chat_template import ChatTemplate, read_template
from server.text.template_renderer import TextMarker
from server.text.tokenizer import Tokenizer


class PromptReader:
    """Makes prompts with the tokenizer, the chat template and the images of a model."""

    def __init__(
        self, path: str, server: ServerConfig, cache_dir: str | None, model_config: ModelConfig
    ) -> None:
        self.tokenizer: Tokenizer | None = None
        """None with skip_tokenizer_init."""
        template: str | dict[str, str] | None = None
        if not server.skip_tokenizer_init:
            self.tokenizer = Tokenizer.load(
                path,
                server.tokenizer_threads,
                cache_dir,
                special_tokens_as_text=server.special_tokens_as_text,
            )
            template = self.tokenizer.chat_template
        self._images: ImageLoader | None = None
        if model_config.vision is not None and self.tokenizer is not None:
            self._images = make_image_inputs(path, model_config.vision, server, self.tokenizer)
        if server.chat_template is not None:
            template = read_template(server.chat_template)
        named = self.tokenizer.special_tokens if self.tokenizer else {}
        self.template = ChatTemplate(template, named, generic_tools=server.tool_template == "auto")
        self.template_defaults = server.template_defaults
        self.max_model_len = model_config.max_position
        """Maximum tokens of a prompt and its output; the engine may lower it."""

    @property
    def mark(self) -> TextMarker | None:
        """Function that marks control tokens in messages."""
        controls = None if self.tokenizer is None else self.tokenizer.controls
        return None if controls is None else controls.marked

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError("there is no tokenizer: skip_tokenizer_init is set")
        return self.tokenizer

    def close(self) -> None:
        self.template.close()
        for part in (self.tokenizer, self._images):
            if part is not None:
                part.close()

    async def load_images(self, sources: list[MediaSource], param: str) -> list[ProcessedImage]:
        if not sources:
            return []
        if self._images is None:
            raise UserError(
                f"the prompt has {len(sources)} images, at most 0 are allowed; load a model that "
                "takes images, and allow them with limit_mm_per_prompt",
                param=param,
            )
        return await self._images.load(sources, param=param)

    async def read(
        self,
        text: str | None,
        ids: list[int] | None,
        sources: list[MediaSource],
        params: SamplingParams,
    ) -> Prompt:
        """A prompt of `ids`, or of `text` with special tokens."""
        images = await self.load_images(sources, "prompt")
        if ids is None or images:
            return await self._read_text(text or "", images, params, special=True)
        return self._truncated(ids, text, params)

    async def read_rendered(
        self, text: str, images: list[ProcessedImage], params: SamplingParams
    ) -> Prompt:
        """A prompt of the text of a chat template, which includes all special tokens."""
        return await self._read_text(text, images, params, special=False)

    async def _read_text(
        self, text: str, images: list[ProcessedImage], params: SamplingParams, *, special: bool
    ) -> Prompt:
        tokenizer = self.require_tokenizer()
        if not images:
            ids = await tokenizer.encode(text, special)
            return self._truncated(ids, tokenizer.unmarked(text), params)
        assert self._images is not None, "the model takes images"
        if params.truncate_prompt_tokens is not None:
            raise UserError(
                f"truncate_prompt_tokens is {params.truncate_prompt_tokens}, and the prompt has "
                f"{len(images)} images, which cannot be truncated",
                param="truncate_prompt_tokens",
            )
        marks = self._images.marks
        images = in_order_of_marks(text, marks, images)
        text = with_image_texts(text, marks, images, "prompt")
        ids = await tokenizer.encode(text, special)
        placed = place_images(ids, self._images.token_ids, images, "prompt")
        return Prompt(ids, tokenizer.unmarked(text), placed)

    def _truncated(self, ids: list[int], text: str | None, params: SamplingParams) -> Prompt:
        keep = params.truncate_prompt_tokens
        return Prompt(truncate_prompt(ids, keep, self.max_model_len, params.max_tokens), text)
