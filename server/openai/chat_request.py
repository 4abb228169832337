"""From chat messages to a prompt and a running request, for all endpoints that take messages."""

import asyncio
from functools import partial

from starlette.requests import Request

from config.errors import PromptTooLong
from server.http.access_log import log_prompt, record_of
from server.openai.answer_format import answer_format
from server.openai.schema.chat import ChatBody, ChatPromptBody
from server.serving.job import Job, check_grammar, start_job
from server.serving.prompts import encode_for_counting, encode_prompt
from server.serving.state import AppState
from server.text.template_renderer import TextTooLong

INLINE_PARTS = 2_000
"""Messages and parts that are checked on the event loop, in a millisecond."""


async def render(state: AppState, body: ChatPromptBody) -> str:
    """The prompt text of a chat. Raises UserError."""
    check = partial(
        body.check_conversation, trust_template=state.config.trust_request_chat_template
    )
    if body.has_more_than(INLINE_PARTS):
        await asyncio.to_thread(check)
    else:
        check()
    template = state.chat_template()
    controls = state.text_tokenizer("messages").controls
    return await template.render(
        body.messages,
        tools=body.visible_tools,
        documents=body.documents,
        add_generation_prompt=body.adds_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        kwargs=body.template_variables,
        template=body.chat_template,
        mark=None if controls is None else controls.marked,
    )


async def start_chat(state: AppState, request: Request, body: ChatBody, *, id_prefix: str) -> Job:
    """Start answering `body`. Raises UserError and Overloaded; then nothing is left behind."""
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
    answers = answer_format(state.parser_config, state.text_tokenizer("messages"), body, text)
    if answers.grammar is not None:
        await check_grammar(state, answers.param, answers.grammar)
    return start_job(
        state,
        request,
        body,
        id_prefix=id_prefix,
        model=model,
        params=answers.sampling(params),
        prompts=[prompt],
        param="messages",
        parsers=answers.parsers,
    )


async def count_prompt_tokens(state: AppState, body: ChatBody) -> int:
    """Number of prompt tokens of `body`, also if the model takes fewer. Raises UserError."""
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
        # Clients shorten a conversation if the error names the context, not characters.
        tokenizer, most = state.text_tokenizer("messages"), state.max_model_len
        if (least := tokenizer.least_tokens(body.text, most)) > most:
            raise PromptTooLong(least, body.limit, most, at_least=True) from None
        raise
