"""POST /v1/chat/completions/render and /v1/completions/render: token ids and sampling parameters of
a request, without running it. Routers that are aware of prefix caches need the token ids. Each
result without images or videos is a body for /inference/v1/generate."""

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from config.errors import UserError
from config.params.sampling import SamplingParams
from config.params.structured_output import fields_of
from server.generation.outputs import Prompt
from server.http.body import Fields, long_json_response, parse
from server.http.json_encoder import encode_json
from server.http.openapi import ANSWERS, takes
from server.multimodal.messages import IMAGE, VIDEO
from server.multimodal.processor import ProcessedImage
from server.openai.chat_request import limit_named, prepare_chat
from server.openai.completions import prepare_completion
from server.openai.schema.chat import ChatBody
from server.openai.schema.completions import CompletionBody
from server.openai.schema.generate import SAMPLING_FIELDS
from server.openai.schema.generation import GenerationBody
from server.serving.job import PreparedRequest, check_queued_tokens, request_id_of
from server.serving.state import AppState

MAX_REPEATED_BYTES = 8 * 2**20
"""Maximum bytes of the sampling parameters in a response for several prompts, over all prompts."""
MODALITIES = {IMAGE: "image", VIDEO: "video"}


def render_routes(state: AppState) -> APIRouter:
    """Routes that render requests to token ids."""
    router = APIRouter(tags=["Tokens"], responses=ANSWERS)

    @router.post(
        "/v1/chat/completions/render",
        summary="Token ids and sampling parameters of a conversation",
        openapi_extra=takes("ChatBody"),
    )
    async def render_chat_completion(request: Request) -> Response:
        state.generation_pipeline()
        body = await parse(ChatBody, await state.bodies.read_object(request))
        _refuse(body, "use_beam_search", is_set=bool(body.use_beam_search))
        is_limited = body.thinking_token_budget is not None
        _refuse(body, "thinking_token_budget", is_set=is_limited)
        with limit_named(body):
            chat = await prepare_chat(state, request, body)
            (rendered,) = await _rendered(state, body, chat.request, "chatcmpl-")
        (prompt,) = chat.request.prompts
        rendered["features"] = _features(prompt, chat.images)
        return await long_json_response(rendered)

    @router.post(
        "/v1/completions/render",
        summary="Token ids and sampling parameters of texts",
        openapi_extra=takes("CompletionBody"),
    )
    async def render_completion(request: Request) -> Response:
        state.generation_pipeline()
        body = await parse(CompletionBody, await state.bodies.read_object(request))
        _refuse(body, "use_beam_search", is_set=bool(body.use_beam_search))
        _refuse(body, "best_of", is_set=body.num_drawn > (body.n or 1))
        texts = await prepare_completion(state, request, body)
        return await long_json_response(await _rendered(state, body, texts, "cmpl-"))

    return router


def _refuse(body: GenerationBody, name: str, *, is_set: bool) -> None:
    if is_set:
        raise UserError(
            f"{name} is {getattr(body, name)}, which cannot be rendered: leave out {name}",
            param=name,
        )


async def _rendered(
    state: AppState,
    body: GenerationBody,
    prepared: PreparedRequest,
    id_prefix: str,
) -> list[Fields]:
    """The body of /inference/v1/generate for each prompt. Raises UserError for a request that could
    not run."""
    params, prompts, param = prepared.params, prepared.prompts, prepared.prompt_field
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    check_queued_tokens(state, num_tokens * params.n, param)
    _, limits = await state.generation_pipeline().check_request(prompts, params, param)
    sampling = await body.on_thread_if_large(partial(_sampling_fields, params, len(prompts)))
    options = body.stream_options
    return [
        {
            "request_id": request_id_of(body, id_prefix),
            "token_ids": prompt.token_ids,
            "assistant_tokens_mask": None,
            "token_offsets": None,
            "features": None,
            "content_parts": None,
            "sampling_params": {**sampling, "max_tokens": limit},
            "model": prepared.model,
            "stream": bool(body.stream),
            "stream_options": options and options.model_dump(),
            "cache_salt": body.cache_salt,
            "priority": body.priority or 0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }
        for prompt, limit in zip(prompts, limits, strict=True)
    ]


def _sampling_fields(params: SamplingParams, num_prompts: int) -> Fields:
    """The `sampling_params` without max_tokens. Raises UserError if they are too long for
    `num_prompts` prompts."""
    sampling = {name: getattr(params, name) for name in SAMPLING_FIELDS}
    # Keys of a JSON object are strings.
    sampling["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    grammar = params.structured_outputs
    sampling["structured_outputs"] = (fields_of(grammar) or None) if grammar else None
    _check_size(len(encode_json(sampling)), num_prompts)
    return sampling


def _check_size(num_bytes: int, num_prompts: int) -> None:
    if num_prompts > 1 and num_bytes * num_prompts > MAX_REPEATED_BYTES:
        raise UserError(
            f"the sampling parameters have {num_bytes} bytes and are repeated for {num_prompts} "
            f"prompts, at most {MAX_REPEATED_BYTES} bytes may be repeated; send at most "
            f"{MAX_REPEATED_BYTES // num_bytes} prompts in a request",
            param="prompt",
        )


def _features(prompt: Prompt, images: Sequence[ProcessedImage]) -> Fields | None:
    """Hashes and positions of the images and videos of a prompt, by modality; None without
    them."""
    if prompt.images is None:
        return None
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[dict[str, int]]] = {}
    for image, placement in zip(images, prompt.images.placements, strict=True):
        modality = MODALITIES[image.kind]
        hashes.setdefault(modality, []).append(placement.content.hex())
        place = {"offset": placement.offset, "length": placement.length}
        places.setdefault(modality, []).append(place)
    return {"mm_hashes": hashes, "mm_placeholders": places, "kwargs_data": None}
