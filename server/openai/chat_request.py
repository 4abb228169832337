"""Converts chat messages to a prompt, and starts chat requests."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request

from config.errors import PromptTooLong, UserError
from server.generation.outputs import Prompt
from server.http.access_log import log_prompt, record_of
from server.http.disconnect import CancelOnDisconnect
from server.http.json_encoder import weighs_more
from server.multimodal.parts import place_images, take_media, with_image_texts
from server.multimodal.processor import ProcessedImage
from server.openai.answer_format import answer_format
from server.openai.schema.chat import ChatBody, ChatPromptBody
from server.openai.schema.structured import place_of
from server.serving.job import PreparedRequest, ServingRequest, check_grammar, start_job
from server.serving.prompts import encode_for_counting, encode_prompt
from server.serving.state import AppState
from server.text.template_renderer import TextTooLong

INLINE_PARTS = 2_000
"""Maximum number of messages and parts, and maximum weight of tools and tool_choice, that are
validated on the event loop: about a millisecond."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Prompt text of a chat. Control tokens in the caller's texts may be marked
    (see server/text/control_tokens.py)."""

    text: str
    images: list[ProcessedImage]
    """Images and videos whose texts are in the prompt."""

    def with_images(self, state: AppState, prompt: Prompt) -> Prompt:
        """Add the images and videos to the encoded prompt. Raises UserError."""
        if not self.images:
            return prompt
        assert state.images is not None, "a chat has images"
        token_ids = state.images.token_ids
        placed = place_images(prompt.token_ids, token_ids, self.images, "messages")
        return replace(prompt, images=placed)

    def check_truncation(self, keep: int | None) -> None:
        """Raise UserError if `keep` limits a prompt with images or videos: truncation might cut the
        tokens of an image or video."""
        if self.images and keep is not None:
            raise UserError(
                f"truncate_prompt_tokens is {keep}, and the prompt has {len(self.images)} images, "
                "which cannot be truncated",
                param="truncate_prompt_tokens",
            )


async def render(state: AppState, request: Request, body: ChatPromptBody) -> RenderedChat:
    """Render the prompt text of a chat and load its images and videos. A uuid refers only to images
    and videos sent with the same API key as `request`. Raises UserError and Overloaded."""
    record = record_of(request.scope)
    client = record.owner or record.client
    inputs = state.images
    check = partial(
        body.check_conversation,
        trust_template=state.config.trust_request_chat_template,
        kinds=state.media_kinds,
    )
    if body.has_more_than(INLINE_PARTS) or weighs_more(
        [body.tools, body.tool_choice], INLINE_PARTS
    ):
        await asyncio.to_thread(check)
    else:
        check()
    template = state.chat_template()
    controls = state.text_tokenizer("messages").controls
    messages, images = body.messages, []
    if inputs is not None:
        messages, sources = take_media(body.messages)
        images = await inputs.load(sources, owner=record.owner, client=client)
    text = await template.render(
        messages,
        tools=body.visible_tools,
        documents=body.documents,
        add_generation_prompt=body.adds_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        kwargs=body.template_variables(state.template_defaults),
        template=body.chat_template,
        mark=None if controls is None else controls.marked,
        client=client,
    )
    if inputs is not None:
        text = with_image_texts(text, inputs.marks, images)
    return RenderedChat(text, images)


async def render_watched(state: AppState, request: Request, body: ChatPromptBody) -> RenderedChat:
    """Call `render`, and cancel it when the client disconnects, since loading images and videos
    may take seconds. Raises UserError, Overloaded and ClientGone."""
    with CancelOnDisconnect(request.receive):
        return await render(state, request, body)


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat that is ready for the engine."""

    request: PreparedRequest
    images: list[ProcessedImage]


async def start_chat(
    state: AppState, request: Request, body: ChatBody, *, id_prefix: str
) -> ServingRequest:
    """Start answering `body`. Raises the errors of `prepare_chat` and `start_job`; an error leaves
    no request in the engine."""
    with limit_named(body):
        chat = await prepare_chat(state, request, body)
        return await start_job(state, request, body, chat.request, id_prefix=id_prefix)


@contextlib.contextmanager
def limit_named(body: ChatBody) -> Iterator[None]:
    """Replace max_tokens as the `param` of errors by the field that sets the limit of `body`."""
    try:
        yield
    except UserError as error:
        if error.param == "max_tokens":
            error.param = body.limit_field
        raise


async def prepare_chat(state: AppState, request: Request, body: ChatBody) -> PreparedChat:
    """Check and render `body`. Raises UserError, Overloaded, ClientGone, and the other errors of
    `check_grammar`."""
    model = state.model(body.model)
    await body.on_thread_if_large(body.check)
    params = await body.sampling_params(
        state.sampling_defaults,
        max_tokens=body.limit,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    if body.may_call:
        state.parser_config.check_auto_tool_choice()
    rendered = await _rendered(state, request, body)
    rendered.check_truncation(body.truncate_prompt_tokens)
    prompt = await encode_prompt(
        state,
        rendered.text,
        special=bool(body.add_special_tokens),
        keep=body.truncate_prompt_tokens,
        keep_end=body.keeps_end,
        limit=body.limit,
        param="messages",
    )
    prompt = rendered.with_images(state, prompt)
    text = state.text_tokenizer("messages").unmarked(rendered.text)
    if state.config.enable_log_requests:
        log_prompt(record_of(request.scope), text)
    make_format = partial(
        answer_format,
        state.parser_config,
        state.text_tokenizer("messages"),
        body,
        text,
        wants_reasoning=body.wants_reasoning(state.template_defaults),
    )
    # Building a grammar is slow even for a few tools.
    is_long = body.visible_tools or body.is_large
    answers = await asyncio.to_thread(make_format) if is_long else make_format()
    if answers.grammar is not None:
        place = place_of(answers.param, body.response_format)
        await check_grammar(state, request, answers.param, answers.grammar, place=place)
    prepared = PreparedRequest(
        model=model,
        params=answers.sampling(params),
        prompts=[prompt],
        prompt_field="messages",
        parsers=answers.parsers,
    )
    return PreparedChat(prepared, rendered.images)


async def count_prompt_tokens(state: AppState, request: Request, body: ChatBody) -> int:
    """Number of prompt tokens of `body`, even beyond the context length (see max_counted_tokens).
    Raises UserError, Overloaded and ClientGone."""
    state.model(body.model)
    await body.on_thread_if_large(body.check)
    rendered = await render_watched(state, request, body)
    rendered.check_truncation(body.truncate_prompt_tokens)
    ids = await encode_for_counting(
        state,
        rendered.text,
        special=bool(body.add_special_tokens),
        keep=body.truncate_prompt_tokens,
        keep_end=body.keeps_end,
        limit=body.limit,
        param="messages",
    )
    return len(ids)


async def _rendered(state: AppState, request: Request, body: ChatBody) -> RenderedChat:
    try:
        return await render_watched(state, request, body)
    except TextTooLong:
        # Clients shorten a conversation if the error names the context length in tokens, not
        # characters.
        tokenizer, most = state.text_tokenizer("messages"), state.max_model_len
        least = await asyncio.to_thread(lambda: tokenizer.least_tokens(body.text, most))
        if least > most:
            raise PromptTooLong(least, body.limit, most, at_least=True) from None
        raise
