"""POST /tokenize and /detokenize, GET /tokenizer_info."""

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from config.errors import UserError
from config.json_text import Json
from config.model.special_tokens import NAMED_TOKENS
from config.params.token_ids import unknown_token
from server.http.body import built_response, long_json_response, parse
from server.http.openapi import ANSWERS, takes
from server.openai.chat_request import render_watched
from server.openai.schema.tokenize import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from server.serving.prompts import encode_for_counting, max_counted_tokens
from server.serving.state import AppState
from server.text.tokenizer import Tokenizer

INLINE_IDS = 10_000
"""Maximum number of tokens that are decoded on the event loop, about a millisecond."""
IDS_PER_VALUE = 5
"""Number of token ids that take as long to encode as a JSON value of other responses."""


def tokenize_routes(state: AppState) -> APIRouter:
    """Routes of /tokenize, /detokenize and /tokenizer_info."""
    router = APIRouter(tags=["Tokens"], responses=ANSWERS)

    @router.post(
        "/tokenize",
        summary="Tokens of a text or a conversation",
        openapi_extra=takes("TokenizeTextBody", "TokenizeChatBody"),
    )
    async def tokenize(request: Request) -> Response:
        state.check_open()
        sent = await state.bodies.read_object(request)
        body: TokenizeTextBody | TokenizeChatBody
        if sent.fields.get("messages") is not None:
            body = await parse(TokenizeChatBody, sent)
            state.model(body.model)
            rendered = await render_watched(state, request, body)
            text, special = rendered.text, bool(body.add_special_tokens)
            param = "messages"
        else:
            body = await parse(TokenizeTextBody, sent)
            state.model(body.model)
            text, special = body.prompt, body.add_special_tokens is not False
            param = "prompt"
        ids = await encode_for_counting(state, text, special=special, param=param)
        num_values = len(ids) // IDS_PER_VALUE
        return await built_response(lambda: _tokenized(state, body, ids), num_values)

    @router.post("/detokenize", summary="The text of tokens", openapi_extra=takes("DetokenizeBody"))
    async def detokenize(request: Request) -> Response:
        state.check_open()
        sent = await state.bodies.read_object(request)
        body = await parse(DetokenizeBody, sent)
        state.model(body.model)
        tokenizer = state.text_tokenizer("tokens")
        if len(body.tokens) > (most := max_counted_tokens(state)):
            raise UserError(
                f"tokens has {len(body.tokens)} ids, it may have at most {most}", param="tokens"
            )
        if len(body.tokens) <= INLINE_IDS:
            text = _text_of(tokenizer, body.tokens)
        else:
            text = await asyncio.to_thread(_text_of, tokenizer, body.tokens)
        return await long_json_response({"prompt": text})

    @router.get(
        "/tokenizer_info",
        summary="Special tokens and chat template",
    )
    async def tokenizer_info() -> Response:
        state.check_open()
        tokenizer = state.text_tokenizer("model")
        tokens = tokenizer.special_tokens
        return await long_json_response(
            {
                "tokenizer_class": tokenizer.tokenizer_class,
                **{name: tokens.get(name) for name in NAMED_TOKENS},
                "chat_template": state.chat_template().default,
                "model_max_length": state.max_model_len,
            }
        )

    return router


def _tokenized(state: AppState, body: TokenizeTextBody | TokenizeChatBody, ids: list[int]) -> Json:
    strings = None
    if body.return_token_strs:
        tokenizer = state.text_tokenizer("return_token_strs")
        strings = [tokenizer.token(token_id) for token_id in ids]
    return {
        "count": len(ids),
        "max_model_len": state.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


def _text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    vocab_size = tokenizer.vocab_size
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise unknown_token("tokens", token_id, vocab_size, "tokens")
    return tokenizer.decode(ids, skip_special_tokens=False)
