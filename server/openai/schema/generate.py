"""The body of /inference/v1/generate: token ids, and sampling parameters under vLLM's names."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, WithJsonSchema

from config.errors import UserError
from config.params.sampling import MAX_LOGPROBS, SamplingParams
from server.http.body import validate_fields
from server.http.body_bounds import PromptIds, Schema
from server.openai.schema.generation import (
    UNSUPPORTED,
    Body,
    GenerationBody,
    Integer,
    StreamOptions,
    Unsupported,
    check_between,
)
from server.openai.schema.json_schema import OBJECT

OUTER_FIELDS = ("model", "request_id", "stream", "stream_options", "cache_salt", "priority")
"""Fields of GenerateBody that are copied to the generation request."""


class TokenBody(GenerationBody):
    """A generation request whose output is token ids."""

    unsupported: ClassVar[Unsupported] = {**UNSUPPORTED, "thinking_token_budget": ()}

    max_tokens: Integer | None = None
    logprobs: Integer | None = None
    detokenize: bool | None = None

    def check(self) -> None:
        super().check()
        check_between(self, "logprobs", 0, MAX_LOGPROBS)


SAMPLING_FIELDS = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in TokenBody.model_fields and name != "truncate_prompt_tokens"
)
"""Sampling parameters that a body may set. A rendered request sets all of them."""
_KNOWN = {*SAMPLING_FIELDS, *TokenBody.unsupported}


class GenerateBody(Body):
    """Body of POST /inference/v1/generate: token ids to continue."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"token_ids": [19556, 17], "sampling_params": {"max_tokens": 8}}
        }
    )
    unsupported: ClassVar[Unsupported] = {
        "content_parts": ([],),
        "ec_transfer_params": ({},),
        "features": (),
        "kv_transfer_params": ({},),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset({"assistant_tokens_mask", "token_offsets"})
    prompt_fields: ClassVar[tuple[str, ...]] = ("token_ids",)

    token_ids: PromptIds
    sampling_params: Annotated[Schema, WithJsonSchema(OBJECT)]
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: Integer | None = None

    @classmethod
    def unknown_fields(cls, data: Mapping[str, Any]) -> list[str]:
        """Names of unknown fields, and of unknown sampling parameters that are set."""
        sampling = data.get("sampling_params")
        given = sampling.items() if isinstance(sampling, dict) else ()
        unknown = [name for name, value in given if value and name not in _KNOWN]
        return [*super().unknown_fields(data), *(f"sampling_params.{name}" for name in unknown)]

    def request(self) -> TokenBody:
        """Convert the body to a generation request. Raises UserError."""
        outer = {name: getattr(self, name) for name in OUTER_FIELDS}
        sampling = {name: value for name, value in self.sampling_params.items() if name in _KNOWN}
        with_ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        if not self.token_ids:
            raise UserError(
                "token_ids is an empty list, it must have at least 1 token id", param="token_ids"
            )
        return validate_fields(TokenBody, {**sampling, **outer, **with_ids})
