"""A conversation to a prompt, and to a request that runs in the engine: what every endpoint that
takes messages shares. Knows no answer."""

import asyncio
from functools import partial

from starlette.requests import Request

from config.errors import PromptTooLong
from server.generation.job import Job, check_grammar, start_job
from server.generation.prompts import encode_for_counting, encode_prompt
from server.http.access_log import log_prompt, record_of
from server.http.state import AppState
from server.openai.answer_format import answer_format
from server.openai.schema.chat import ChatBody, ChatPromptBody
from server.text.template_renderer import TextTooLong

MANY_PIECES = 2_000
"""Messages and parts that are checked on the event loop: a millisecond."""


async def render(state: AppState, body: ChatPromptBody) -> str:
    """A conversation as the model's text. Raises UserError."""
    check = partial(
        body.check_conversation, trust_template=state.config.trust_request_chat_template
    )
    if body.has_more_than(MANY_PIECES):
        await asyncio.to_thread(check)
    else:
        check()
    template = state.chat_template()
    controls = state.text_tokenizer("messages").controls
    return await template.render(
        body.messages,
        tools=body.shown_tools,
        documents=body.documents,
        add_generation_prompt=body.opens_answer,
        continue_final_message=bool(body.continue_final_message),
        kwargs=body.template_variables,
        template=body.chat_template,
        mark=None if controls is None else controls.marked,
    )


async def start_chat(state: AppState, request: Request, body: ChatBody, *, id_prefix: str) -> Job:
    """Have `body` answered. Raises whatever is wrong with it; then nothing is left behind."""
    model = state.model(body.model)
    body.check()
    params = body.sampling(
        state.sampling_defaults,
        max_tokens=body.limit,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    if body.tools and body.tool_choice in (None, "auto"):
        state.parser_config.check_auto_tool_choice()
    marked = await _rendered(state, body)
    prompt = await encode_prompt(
        state,
        marked,
        special=bool(body.add_special_tokens),
        keep=body.truncate_prompt_tokens,
        limit=body.limit,
        param="messages",
    )
    text = state.text_tokenizer("messages").unmarked(marked)
    if state.config.enable_log_requests:
        log_prompt(record_of(request.scope), text)
    terms = answer_format(state.parser_config, state.text_tokenizer("messages"), body, text)
    if terms.form is not None:
        await check_grammar(state, terms.field, terms.form)
    return start_job(
        state,
        request,
        body,
        id_prefix=id_prefix,
        model=model,
        params=terms.sampling(params),
        prompts=[prompt],
        param="messages",
        parsers=terms.answers,
    )


async def count_prompt_tokens(state: AppState, body: ChatBody) -> int:
    """How many tokens the prompt of `body` has, also where they are too many for the model. Raises
    UserError."""
    state.model(body.model)
    body.check()
    text = await render(state, body)
    ids = await encode_for_counting(
        state,
        text,
        special=bool(body.add_special_tokens),
        keep=body.truncate_prompt_tokens,
        limit=body.limit,
        param="messages",
    )
    return len(ids)


async def _rendered(state: AppState, body: ChatBody) -> str:
    try:
        return await render(state, body)
    except TextTooLong:
        # Clients shorten a conversation when they read of the context, not of characters.
        tokenizer, most = state.text_tokenizer("messages"), state.max_model_len
        if (least := tokenizer.least_tokens(body.text, most)) > most:
            raise PromptTooLong(least, body.limit, most, at_least=True) from None
        raise
