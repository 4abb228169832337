"""Base classes of all request bodies: strict types, sampling fields, unsupported fields."""

import asyncio
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from config.errors import UserError, value_text
from config.params.sampling import MAX_LOGPROBS, SamplingParams
from config.params.structured_output import GrammarSpec
from server.http.body_bounds import (
    Biases,
    Label,
    Schema,
    SchemaOrText,
    Strings,
    TagOrText,
    TokenIds,
    Words,
    whole,
)
from server.http.held_bodies import NOT_HELD, HeldBody, memory_of
from server.http.json_encoder import weighs_more
from server.openai.schema.json_schema import TEXT, any_of, array
from server.openai.schema.structured import FIELDS, spec_of

R = TypeVar("R")

MAX_SALT_CHARACTERS = 128
MAX_REQUEST_ID_CHARACTERS = 512
INLINE_IDS = 5_000
"""Maximum number of token ids converted on the event loop, about a millisecond."""
INLINE_WEIGHT = 2_000
"""Maximum weight (see `weighs_more`) of schema fields converted on the event loop."""
LEFT_WEIGHT = 4_000
"""Weight (see `weighs_more`) of the fields besides the prompt above which they stay accounted for
until the request ends: 100 to 500 kB."""
BIAS_BYTES = 240
"""Memory of an entry of `logit_bias` in its copies for sampling, here and in the engine."""
MAX_STOP_CHARACTERS = 1_024
"""Maximum length of a stop string. Text that may be the beginning of a stop string is held back."""
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters, besides max_tokens, that a model's generation_config may set."""


def _listed(value: object) -> object:
    if not isinstance(value, (str, list)):
        raise ValueError(f"is {value_text(value)}, it must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


Integer = Annotated[int, BeforeValidator(whole), WithJsonSchema({"type": "integer"})]
TextOrTexts = Annotated[
    Strings,
    BeforeValidator(_listed),
    WithJsonSchema(any_of(TEXT, array(TEXT))),
]

Unsupported = Mapping[str, tuple[object, ...]]
OtherRoutes = Mapping[str, tuple[str, str]]

UNSUPPORTED: Unsupported = {
    "audio": (),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "vllm_xargs": ({},),
}
"""Unsupported field -> values without effect, besides null. Other values are rejected, because
silently ignoring them would return wrong output with a 200."""


class Body(BaseModel):
    """Base of request bodies: strict types; unknown fields are ignored; null means the default in
    fields that allow null."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    unsupported: ClassVar[Unsupported] = {}
    instead: ClassVar[Mapping[str, str]] = {}
    """Unsupported field -> what to send instead."""
    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields that cannot change any response of this server, so they are ignored silently."""

    @classmethod
    def unknown_fields(cls, data: Mapping[str, Any]) -> list[str]:
        """Fields of `data` that are not null and that this body does not define."""
        known = cls.model_fields.keys() | cls.unsupported.keys() | cls.without_effect
        return [name for name, value in data.items() if name not in known and value is not None]

    prompt_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that are only needed for the prompt."""

    _held: HeldBody = PrivateAttr(default_factory=lambda: NOT_HELD)

    def hold(self, held: HeldBody) -> None:
        """Count the body's memory in `held` for as long as the body is referenced."""
        self._held = held

    @property
    def held(self) -> HeldBody:
        """Accounted memory of the body."""
        return self._held

    _left_bytes: int = PrivateAttr(default=sys.maxsize)

    def measure(self) -> None:
        """Determine the memory that `drop_prompt` leaves. For a large body call it on a thread."""
        self._left_bytes = memory_of(self._left())

    def drop_prompt(self, left_bytes: int = 0) -> None:
        """Empty the prompt fields, because the running request needs only the other fields.
        `left_bytes`: memory that the request still needs besides the body. If the other fields are
        large, they stay accounted for; without `measure`, the whole body."""
        for name in self.prompt_fields:
            if value := getattr(self, name):
                setattr(self, name, type(value)())
        is_small = not weighs_more(self._left(), LEFT_WEIGHT)
        self._held.free(left_bytes if is_small else left_bytes + self._left_bytes)

    def _left(self) -> list[object]:
        """Values of the fields besides the prompt fields."""
        return [
            value.__dict__ if isinstance(value, BaseModel) else value
            for name, value in self.__dict__.items()
            if name not in self.prompt_fields
        ]

    other_routes: ClassVar[OtherRoutes] = {}
    """Field of another route's body -> (field that this body needs instead, other route)."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, (needed, route) in cls.other_routes.items():
            if name in data and needed not in data:
                raise UserError(
                    f"{needed} is missing; a body with {name} belongs to {route}", param=needed
                )
        for name in cls.unsupported.keys() & data.keys():
            value, harmless = data[name], cls.unsupported[name]
            is_harmless = any(type(value) is type(name) and value == name for name in harmless)
            if value is not None and not is_harmless:
                advice = f"use {cls.instead[name]}" if name in cls.instead else "leave it out"
                raise UserError(f"{name} is not supported by this server; {advice}", param=name)
        return data


class StreamOptions(Body):
    """Additional content of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """Sampling and transport fields of all generation requests."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED
    instead: ClassVar[Mapping[str, str]] = {"functions": "tools", "function_call": "tool_choice"}
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"media_io_kwargs", "mm_processor_kwargs", "prediction", "prompt_cache_retention"}
    )
    schema_fields: ClassVar[tuple[str, ...]] = ("response_format", "structured_outputs", *FIELDS)
    """Fields that may contain a large schema."""

    model: str | None = Field(None, description="A served name; default: the first.")
    n: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: TextOrTexts | None = None
    seed: Integer | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    response_format: Schema | None = None
    structured_outputs: Schema | None = None
    guided_json: SchemaOrText | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Words | None = None
    guided_grammar: str | None = None
    json_schema: SchemaOrText | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: TagOrText | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Label | None = None

    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: Strings | None = None
    allowed_token_ids: TokenIds | None = None
    use_beam_search: bool | None = Field(None, description="Use beam search with n beams.")
    length_penalty: float | None = None
    prompt_logprobs: Integer | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    priority: Integer | None = None
    timeout: float | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def check(self) -> None:
        """Check what the field types do not check. Raises UserError."""
        if self.stream_options is not None and not self.stream:
            raise UserError(
                "stream must be true if stream_options is set",
                param="stream_options",
            )
        check_between(self, "prompt_logprobs", 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None and self.stream:
            raise UserError(
                "prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs"
            )
        keep = self.truncate_prompt_tokens
        if keep is not None and keep != -1 and keep < 1:
            raise UserError(
                f"truncate_prompt_tokens is {keep}, it must be -1, or at least 1",
                param="truncate_prompt_tokens",
            )
        check_stops(self.stop, "stop")
        _check_beam_search(self)
        check_salt(self.cache_salt)
        check_request_id(self.request_id)

    @property
    def constraint(self) -> tuple[str, GrammarSpec] | None:
        """(field, grammar) that constrain the output; None: no constraint. Raises UserError."""
        given = ((name, getattr(self, name)) for name in FIELDS)
        others = {name: value for name, value in given if value is not None}
        return spec_of(self.response_format, self.structured_outputs, others)

    @property
    def num_prompt_logprob_lists(self) -> int:
        """Number of times that the response lists the log-probabilities of a prompt."""
        return 1

    @property
    def keeps_end(self) -> bool:
        """Whether truncation keeps the end of the prompt."""
        return self.truncation_side != "right"

    @property
    def includes_usage(self) -> bool:
        """Whether the request asks for a usage chunk at the end of a stream."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def is_large(self) -> bool:
        """Whether the body has more than INLINE_IDS token ids, or schemas that weigh more than
        INLINE_WEIGHT, so that it is validated and converted on a thread."""
        lists = (self.logit_bias, self.stop_token_ids, self.allowed_token_ids)
        if sum(len(entries) for entries in lists if entries is not None) > INLINE_IDS:
            return True
        return weighs_more([getattr(self, name) for name in self.schema_fields], INLINE_WEIGHT)

    async def on_thread_if_large(self, call: Callable[[], R]) -> R:
        """Result of `call`, which validates or converts this body; on a thread if the body is
        large. Raises the errors of `call`."""
        return await asyncio.to_thread(call) if self.is_large else call()

    async def sampling_params(
        self,
        defaults: Mapping[str, float],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """Call `sampling`, on a thread for a large body. Raises UserError."""
        convert = partial(
            self.sampling,
            defaults,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return await self.on_thread_if_large(convert)

    def sampling(
        self,
        defaults: Mapping[str, float],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """Sampling parameters: the fields of the body, with the model's `defaults` for absent
        fields. Raises UserError."""
        chosen: dict[str, Any] = {
            name: defaults[name] for name in GENERATION_DEFAULTS if name in defaults
        }
        if "top_k" in chosen:
            chosen["top_k"] = int(chosen["top_k"])
        for name in _DIRECT:
            value = getattr(self, name)
            if value is not None:
                chosen[name] = value
        if self.logit_bias is not None:
            chosen["logit_bias"] = {_token_id(k): v for k, v in self.logit_bias.items()}
        if (constraint := self.constraint) is not None:
            chosen["structured_outputs"] = constraint[1]
        return SamplingParams(
            **chosen, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
        )


_CONVERTED = {"logit_bias", "prompt_logprobs", "structured_outputs", "truncate_prompt_tokens"}
_DIRECT = set(SamplingParams.__struct_fields__) & set(GenerationBody.model_fields) - _CONVERTED
"""Fields that are passed on without conversion."""


def check_between(body: Body, name: str, least: int, most: int) -> None:
    """Raise UserError for a number outside the range, which includes both bounds."""
    value = getattr(body, name)
    if value is not None and not least <= value <= most:
        shown = value_text(value)
        raise UserError(f"{name} is {shown}, it must be between {least} and {most}", param=name)


def check_at_least(body: Body, name: str, least: int) -> None:
    """Raise UserError for a number below the minimum."""
    value = getattr(body, name)
    if value is not None and value < least:
        raise UserError(f"{name} is {value_text(value)}, it must be at least {least}", param=name)


def _token_id(word: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) <= 12):
        raise UserError(
            f"logit_bias has the key {value_text(word)}, it must be a token id, such as '50'",
            param="logit_bias",
        )
    return int(word)


def check_stops(stops: list[str] | None, name: str) -> None:
    """Raise UserError for a stop string that is empty or too long."""
    for stop in stops or ():
        if not stop:
            raise UserError(
                f"{name} has an empty string, its strings must have at least 1 character",
                param=name,
            )
        if len(stop) > MAX_STOP_CHARACTERS:
            raise UserError(
                f"{name} has a string of {len(stop)} characters, at most {MAX_STOP_CHARACTERS} "
                "are allowed",
                param=name,
            )


def check_salt(salt: str | None) -> None:
    """Raise UserError for an invalid cache_salt."""
    if salt is None:
        return
    if not 1 <= len(salt) <= MAX_SALT_CHARACTERS:
        raise UserError(
            f"cache_salt has {len(salt)} characters, it must have 1 to {MAX_SALT_CHARACTERS}",
            param="cache_salt",
        )
    strange = [c for c in salt if c in "@/\\\0"]
    if strange:
        raise UserError(
            f"cache_salt has {strange[0]!r}, it must have no @, /, \\ or NUL", param="cache_salt"
        )


def check_request_id(request_id: str | None) -> None:
    """Raise UserError for an invalid request_id."""
    if request_id is not None and not is_header_word(request_id):
        raise UserError(
            f"request_id is {value_text(request_id)}, it must be 1 to {MAX_REQUEST_ID_CHARACTERS} "
            "visible ASCII characters",
            param="request_id",
        )


def is_header_word(word: str) -> bool:
    """Whether `word` can be part of a header and of an id: 1 to 512 visible ASCII characters."""
    return 1 <= len(word) <= MAX_REQUEST_ID_CHARACTERS and all("!" <= c <= "~" for c in word)


_AFFECT_TOKENS = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "stop": ([],),
}
"""Field that beam search rejects, because it changes which tokens are generated -> the neutral
values, which beam search accepts."""


def _check_beam_search(body: GenerationBody) -> None:
    """Raise UserError for fields that do not apply to a beam search, and without a beam search for
    a length_penalty other than 1. Sampling fields (temperature, top_p, top_k, min_p, seed) are
    ignored."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            raise UserError(
                f"length_penalty is {value_text(body.length_penalty)}, it must be 1 without "
                "use_beam_search",
                param="length_penalty",
            )
        return
    if body.stream:
        raise UserError(
            "a beam search cannot be streamed: its best sequence is known at the end; set stream "
            "to false",
            param="stream",
        )
    for name, neutral in _AFFECT_TOKENS.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            hint = "; use stop_token_ids" if name == "stop" else ""
            raise UserError(f"{name} cannot be combined with use_beam_search{hint}", param=name)
    constraint = body.constraint
    if constraint is not None:
        raise UserError(
            f"{constraint[0]} cannot be combined with use_beam_search", param=constraint[0]
        )
