"""Bodies of the routes of pooling models: embeddings, classes, scores. Know no tokenizer."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from config.errors import UserError
from server.openai.schema.chat import ConversationBody
from server.openai.schema.completions import (
    Texts,
    TokenLists,
    given_prompts,
    most_ids,
    prompts_schema,
)
from server.openai.schema.generation import Body, Integer, Unsupported, check_request_id, check_salt

MAX_INPUTS = 2048
MANY_IDS = 10_000

UNSUPPORTED: Unsupported = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "late_chunking": (False,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "padding": ("do_not_pad",),
    "rank_fields": ([], ["text"]),
}
"""Fields that ask for what we cannot do, and their values that ask for nothing."""

_TEXT = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}},
    ]
}
_TEXTS = {"anyOf": [*_TEXT["anyOf"], {"type": "array", "items": _TEXT, "maxItems": MAX_INPUTS}]}

TextField = Annotated[Any, WithJsonSchema(_TEXT)]
TextsField = Annotated[Any, WithJsonSchema(_TEXTS)]
OptionalTexts = Annotated[Any, WithJsonSchema({"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]})]


class PoolingBody(Body):
    """What every request for vectors or scores may say."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED

    model: str | None = Field(None, description="A served name; null is the first one.")
    user: str | None = None
    truncate_prompt_tokens: Integer | None = Field(
        None, description="Cut longer inputs to so many tokens; -1: to what the model takes."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where a longer input is cut; null is right: its beginning is kept."
    )
    use_activation: bool | None = Field(
        None,
        description="Vectors of length 1; numbers between 0 and 1 for scores and classes. null: as "
        "the model was made for.",
    )
    normalize: bool | None = Field(None, description="An older name of use_activation.")
    priority: Integer | None = None
    request_id: str | None = None
    cache_salt: str | None = None

    def check(self) -> None:
        """Contradictions that no single field shows. Raises UserError."""
        check_salt(self.cache_salt)
        check_request_id(self.request_id)
        if None not in (self.use_activation, self.normalize) and (
            self.use_activation != self.normalize
        ):
            raise UserError(
                f"use_activation is {self.use_activation} and normalize, its older name, is "
                f"{self.normalize}",
                param="use_activation",
            )

    @property
    def normalizes(self) -> bool | None:
        """Whether the result is brought to its usual scale; None: as the model has it."""
        return self.normalize if self.use_activation is None else self.use_activation


class _Encoded(Body):
    """How vectors are written, and how long they are."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None


class _Prompts(Body):
    """Texts or token ids."""

    input: Annotated[Any, WithJsonSchema(prompts_schema(MAX_INPUTS))]
    add_special_tokens: bool | None = Field(
        None, description="Whether special tokens are put around a text; null is true."
    )
    prompt_name: str | None = Field(
        None, description="Which of the model's prompts goes before each text; null: its default."
    )

    @property
    def is_listed(self) -> bool:
        """Whether the inputs came as a list, so that each has an index."""
        return isinstance(self.input, list) and bool(self.input) and type(self.input[0]) is not int

    @property
    def is_big(self) -> bool:
        """Whether so many token ids came that checking them takes over a millisecond."""
        if not self.is_listed:
            return most_ids(self.input) > MANY_IDS
        return sum(len(one) for one in self.input if isinstance(one, list)) > MANY_IDS

    def inputs(self) -> Texts | TokenLists:
        """The inputs, one or many, all of one kind. Raises UserError."""
        inputs = given_prompts(self.input, "input", MAX_INPUTS)
        for place, one in enumerate(inputs):
            if one == "":
                where = f"input[{place}]" if self.is_listed else "input"
                raise UserError(f"{where} is an empty string", param="input")
        return inputs


class _Conversation(ConversationBody):
    """Messages, which the chat template makes one text of."""

    unsupported: ClassVar[Unsupported] = {**UNSUPPORTED, "prompt_name": ()}

    add_special_tokens: bool | None = None

    @property
    def opens_answer(self) -> bool:
        """There is no answer to begin, unless the caller says so."""
        return bool(self.add_generation_prompt)


class EmbeddingBody(_Prompts, _Encoded, PoolingBody):
    """Texts or token ids whose vectors are asked for."""

    model_config = ConfigDict(json_schema_extra={"example": {"input": ["Hello!", "Good day!"]}})


class EmbeddingChatBody(_Conversation, _Encoded, PoolingBody):
    """A conversation whose vector is asked for."""


class PoolBody(EmbeddingBody):
    """Texts or token ids, and what to make of them."""

    task: Literal["embed", "token_embed", "classify", "score"] | None = Field(
        None, description="null: the first of these that the model can."
    )


class PoolChatBody(EmbeddingChatBody):
    """A conversation, and what to make of it."""

    task: Literal["embed", "token_embed", "classify", "score"] | None = None


class ClassifyBody(_Prompts, PoolingBody):
    """Texts or token ids whose classes are asked for."""

    model_config = ConfigDict(json_schema_extra={"example": {"input": "Hello!"}})


class ClassifyChatBody(_Conversation, PoolingBody):
    """A conversation whose classes are asked for."""


class PairBody(PoolingBody):
    """What requests for scores of pairs share."""

    max_tokens_per_query: Integer | None = Field(
        None, description="Cut longer first texts to so many tokens."
    )
    max_tokens_per_doc: Integer | None = Field(
        None, description="Cut longer second texts to so many tokens."
    )

    def check(self) -> None:
        super().check()
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(f"{name} is {value}, it must be at least 0 (off)", param=name)


class ScoreBody(PairBody):
    """TextPairs of texts: one with each of many, or each with its like. One of the spellings."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"text_1": "a cat", "text_2": ["a kitten", "a car"]}}
    )
    spellings: ClassVar[tuple[tuple[str, str], ...]] = (
        ("text_1", "text_2"),
        ("queries", "documents"),
        ("queries", "items"),
        ("data_1", "data_2"),
    )

    text_1: OptionalTexts = None
    text_2: OptionalTexts = None
    queries: OptionalTexts = None
    documents: OptionalTexts = None
    items: OptionalTexts = None
    data_1: OptionalTexts = None
    data_2: OptionalTexts = None

    @property
    def names(self) -> tuple[str, str]:
        """The two fields that hold the texts. Raises UserError unless it is just one pair."""
        known = [name for pair in self.spellings for name in pair]
        named = {name for name in known if getattr(self, name) is not None}
        for pair in self.spellings:
            if named == set(pair):
                return pair
        for first, second in self.spellings:
            if named in ({first}, {second}):
                missing = second if first in named else first
                raise UserError(f"{missing} is missing", param=missing)
        if not named:
            raise UserError("text_1 and text_2 are missing", param="text_1")
        raise UserError(
            f"{', '.join(sorted(named))} do not go together, send text_1 and text_2",
            param=min(named),
        )

    def pairs(self) -> tuple[list[str], list[str]]:
        """The first texts and the second ones. Raises UserError."""
        first, second = self.names
        return texts_of(getattr(self, first), first), texts_of(getattr(self, second), second)


class RerankBody(PairBody):
    """A query, and documents to be sorted by how well they answer it."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"query": "a cat", "documents": ["a kitten", "a car"]}}
    )

    query: TextField
    documents: TextsField
    top_n: Integer | None = Field(None, description="The best so many; null or 0: all.")
    return_documents: bool | None = Field(None, description="null is true.")

    def check(self) -> None:
        super().check()
        if self.top_n is not None and self.top_n < 0:
            raise UserError(f"top_n is {self.top_n}, it must be at least 0 (all)", param="top_n")

    def pairs(self) -> tuple[list[str], list[str]]:
        """The query alone, and the documents. Raises UserError."""
        if isinstance(self.query, list):
            raise UserError("query is a list, it must be one text", param="query")
        return texts_of(self.query, "query"), texts_of(self.documents, "documents")


def texts_of(given: Any, name: str) -> list[str]:
    """One text or many, each a string, {"text": ...} or {"content": [text parts]}. Raises
    UserError with the index of a wrong one."""
    many = given if isinstance(given, list) else [given]
    if not many:
        raise UserError(f"{name} is an empty list, it must hold at least 1 text", param=name)
    if len(many) > MAX_INPUTS:
        raise UserError(f"{name} has {len(many)} texts, it may have {MAX_INPUTS}", param=name)
    return [
        _text(one, f"{name}[{place}]" if isinstance(given, list) else name, name)
        for place, one in enumerate(many)
    ]


def _text(given: Any, where: str, name: str) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, dict):
        text = given.get("text")
        parts = given.get("content")
        if isinstance(text, str):
            return text
        if isinstance(parts, str):
            return parts
        if isinstance(parts, list) and all(_is_text_part(part) for part in parts):
            return "".join(part["text"] for part in parts)
    raise UserError(f"{where} must be a string, or an object with a text", param=name)


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )
