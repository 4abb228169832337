"""Request bodies of the pooling routes: embeddings, classes, scores."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from config.errors import UserError, value_text
from server.http.body_bounds import Label, Strings
from server.openai.schema.chat import ChatPromptBody
from server.openai.schema.completions import (
    Texts,
    TokenLists,
    given_prompts,
    numbers_of_ids,
    prompts_schema,
)
from server.openai.schema.generation import Body, Integer, Unsupported, check_request_id, check_salt

MAX_INPUTS = 2048
MAX_TYPES = 16
"""Maximum entries of `embedding_types`."""
MANY_IDS = 10_000
"""Maximum number of token ids that are validated on the event loop, about a millisecond."""

UNSUPPORTED: Unsupported = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "late_chunking": (False,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "padding": ("do_not_pad",),
    "rank_fields": ([], ["text"]),
}
"""Field of an unsupported feature -> accepted values, which do not use the feature."""

_TEXT = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}},
    ]
}
_TEXTS = {"anyOf": [*_TEXT["anyOf"], {"type": "array", "items": _TEXT, "maxItems": MAX_INPUTS}]}

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]
Task = Literal["embed", "classify", "score", "token_embed"]
TextField = Annotated[Any, WithJsonSchema(_TEXT)]
TextsField = Annotated[Any, WithJsonSchema(_TEXTS)]
OptionalTexts = Annotated[Any, WithJsonSchema({"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]})]


class EngineBody(Body):
    """Fields of all requests to a pooling model."""

    model: str | None = Field(None, description="A served name; default: the first.")
    user: Label | None = None
    priority: Integer | None = None
    timeout: float | None = None
    request_id: str | None = None
    cache_salt: str | None = None

    def check(self) -> None:
        """Check what the field types do not check. Raises UserError."""
        check_salt(self.cache_salt)
        check_request_id(self.request_id)


class PoolingBody(EngineBody):
    """Fields of all pooling requests in vLLM's format."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED

    truncate_prompt_tokens: Integer | None = Field(
        None,
        description="Truncate each input to this many tokens; -1: the model's maximum.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None,
        description="The side that is cut off; default right.",
    )
    use_activation: bool | None = Field(
        None,
        description="Normalize vectors to length 1, scores and classes to 0 to 1; default: the "
        "model's.",
    )
    normalize: bool | None = Field(None, description="Older name of use_activation.")

    def check(self) -> None:
        super().check()
        if None not in (self.use_activation, self.normalize) and (
            self.use_activation != self.normalize
        ):
            raise UserError(
                f"use_activation is {value_text(self.use_activation)} and normalize is "
                f"{value_text(self.normalize)}, its older name, which must be equal",
                param="use_activation",
            )

    @property
    def normalizes(self) -> bool | None:
        """Whether the result is normalized; None: the model's default."""
        return self.normalize if self.use_activation is None else self.use_activation


class _Encoded(Body):
    """Encoding and size of vectors."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None


class _Prompts(Body):
    """Texts or token ids."""

    prompt_fields: ClassVar[tuple[str, ...]] = ("input",)

    input: Annotated[Any, WithJsonSchema(prompts_schema(MAX_INPUTS))]
    add_special_tokens: bool | None = Field(
        None, description="Add special tokens to a text; default true."
    )
    prompt_name: Label | None = Field(
        None, description="Name of the model's prompt before each text; default: its own."
    )

    @property
    def is_listed(self) -> bool:
        """Whether the input is a list of texts or of token id lists."""
        return isinstance(self.input, list) and bool(self.input) and type(self.input[0]) is not int

    @property
    def is_big(self) -> bool:
        """Whether validating the token ids takes over a millisecond."""
        return sum(numbers_of_ids(self.input)) > MANY_IDS

    def inputs(self) -> Texts | TokenLists:
        """The inputs as a list, all texts or all token ids. Raises UserError."""
        inputs = given_prompts(self.input, "input", MAX_INPUTS)
        for index, item in enumerate(inputs):
            if item == "":
                where = f"input[{index}]" if self.is_listed else "input"
                raise UserError(f"{where} is '', it must have at least 1 character", param="input")
        return inputs


class _Conversation(ChatPromptBody):
    """Messages that the chat template renders to a single text."""

    unsupported: ClassVar[Unsupported] = {**UNSUPPORTED, "prompt_name": ()}

    add_special_tokens: bool | None = None

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the prompt ends with the header of an assistant message; default false."""
        return bool(self.add_generation_prompt)


class EmbeddingBody(_Prompts, _Encoded, PoolingBody):
    """Texts or token ids to embed."""

    model_config = ConfigDict(json_schema_extra={"example": {"input": ["Hello!", "Good day!"]}})


class EmbeddingChatBody(_Conversation, _Encoded, PoolingBody):
    """A conversation to embed."""


class CohereEmbedBody(EngineBody):
    """Texts to embed, in Cohere's format."""

    model_config = ConfigDict(json_schema_extra={"example": {"texts": ["Hello!", "Good day!"]}})
    prompt_fields: ClassVar[tuple[str, ...]] = ("texts", "inputs")

    texts: Strings | None = Field(None, description="The texts to embed.")
    inputs: list[dict[str, object]] | None = Field(
        None,
        max_length=MAX_INPUTS,
        description="Objects with text parts as content, instead of texts.",
    )
    images: list[object] | None = Field(None, description="Refused: only text can be embedded.")
    input_type: Label | None = Field(
        None, description="Name of the model's prompt before each text; default: its own."
    )
    embedding_types: list[EmbeddingType] | None = Field(
        None, max_length=MAX_TYPES, description="Types of the vectors; default float."
    )
    output_dimension: Integer | None = Field(
        None, description="Same as dimensions of /v1/embeddings."
    )
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None,
        description="The side that is cut off; NONE: answer with 400. Default END.",
    )
    max_tokens: Integer | None = Field(
        None, description="Maximum tokens of an input; default: the model's."
    )

    @property
    def given(self) -> list[str]:
        """Names of the input fields that are set."""
        return [n for n in ("texts", "inputs", "images") if isinstance(getattr(self, n), list)]

    @property
    def source(self) -> str:
        """Name of the input field; call `check` first."""
        return self.given[0]

    @property
    def types(self) -> Sequence[str]:
        """Types of the vectors, without duplicates."""
        return list(dict.fromkeys(self.embedding_types or ("float",)))

    def check(self) -> None:
        super().check()
        if "images" in self.given:
            raise UserError("images cannot be embedded, send text", param="images")
        if not self.given:
            raise UserError("texts is missing", param="texts")
        if len(self.given) > 1:
            raise UserError("texts and inputs cannot both be given", param="inputs")
        for name in ("max_tokens", "output_dimension"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise UserError(f"{name} is {value}, it must be at least 1", param=name)

    def embedded_texts(self) -> list[str]:
        """The texts: at least 1, and none of them empty. Raises UserError."""
        texts = texts_of(getattr(self, self.source), self.source)
        if "" in texts:
            where = f"{self.source}[{texts.index('')}]"
            raise UserError(f"{where} is an empty string", param=self.source)
        return texts


class PoolBody(EmbeddingBody):
    """Body of POST /pooling with texts or token ids."""

    task: Task | None = Field(
        None, description="What to compute; null: the first of these tasks that the model supports."
    )


class PoolChatBody(EmbeddingChatBody):
    """Body of POST /pooling with a conversation."""

    task: Task | None = None


class ClassifyBody(_Prompts, PoolingBody):
    """Texts or token ids to classify."""

    model_config = ConfigDict(json_schema_extra={"example": {"input": "Hello!"}})


class ClassifyChatBody(_Conversation, PoolingBody):
    """A conversation to classify."""


class PairBody(PoolingBody):
    """Common fields of score and rerank requests."""

    max_tokens_per_query: Integer | None = Field(
        None, description="Truncate the first text to this many tokens."
    )
    max_tokens_per_doc: Integer | None = Field(
        None, description="Truncate the second text to this many tokens."
    )

    def check(self) -> None:
        super().check()
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(f"{name} is {value}, it must be at least 0 (off)", param=name)


class ScoreBody(PairBody):
    """Pairs of texts: a single text with each of many texts, or two lists of equal length; in one
    of the field_pairs."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"text_1": "a cat", "text_2": ["a kitten", "a car"]}}
    )
    field_pairs: ClassVar[tuple[tuple[str, str], ...]] = (
        ("text_1", "text_2"),
        ("queries", "documents"),
        ("queries", "items"),
        ("data_1", "data_2"),
    )
    prompt_fields: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys(sum(field_pairs, ())))

    text_1: OptionalTexts = None
    text_2: OptionalTexts = None
    queries: OptionalTexts = None
    documents: OptionalTexts = None
    items: OptionalTexts = None
    data_1: OptionalTexts = None
    data_2: OptionalTexts = None

    @property
    def names(self) -> tuple[str, str]:
        """The two field names of the pair that is set. Raises UserError unless exactly 1 pair is
        set."""
        names = [name for pair in self.field_pairs for name in pair]
        given = {name for name in names if getattr(self, name) is not None}
        for pair in self.field_pairs:
            if given == set(pair):
                return pair
        for first, second in self.field_pairs:
            if given in ({first}, {second}):
                missing = second if first in given else first
                raise UserError(
                    f"{missing} is missing, it must be a string or a list of strings", param=missing
                )
        if not given:
            raise UserError(
                "text_1 and text_2 are missing, each must be a string or a list of strings",
                param="text_1",
            )
        raise UserError(
            f"{', '.join(sorted(given))} cannot be combined: send text_1 and text_2",
            param=min(given),
        )

    def pairs(self) -> tuple[list[str], list[str]]:
        """(first texts, second texts). Raises UserError."""
        first, second = self.names
        return texts_of(getattr(self, first), first), texts_of(getattr(self, second), second)


class RerankBody(PairBody):
    """A query, and documents to rank by relevance."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"query": "a cat", "documents": ["a kitten", "a car"]}}
    )

    names: ClassVar[tuple[str, str]] = ("query", "documents")
    prompt_fields: ClassVar[tuple[str, ...]] = names

    query: TextField
    documents: TextsField
    top_n: Integer | None = Field(
        None, description="Number of documents, best first; default, or 0: all."
    )
    return_documents: bool | None = Field(
        None, description="Return the documents too; default true."
    )

    def check(self) -> None:
        super().check()
        if self.top_n is not None and self.top_n < 0:
            raise UserError(f"top_n is {self.top_n}, it must be at least 0 (all)", param="top_n")

    def pairs(self) -> tuple[list[str], list[str]]:
        """(list with the query, documents). Raises UserError."""
        if isinstance(self.query, list):
            raise UserError("query is a list, it must be a string", param="query")
        return texts_of(self.query, "query"), texts_of(self.documents, "documents")


def texts_of(given: object, name: str) -> list[str]:
    """List of texts from a text or a list of texts. A text is a string, {"text": ...} or
    {"content": ...} with a string or text parts. Raises UserError with the index of an invalid
    text."""
    texts = given if isinstance(given, list) else [given]
    if not texts:
        raise UserError(f"{name} is an empty list, it must have at least 1 text", param=name)
    if len(texts) > MAX_INPUTS:
        raise UserError(
            f"{name} has {len(texts)} texts, at most {MAX_INPUTS} are allowed", param=name
        )
    return [
        _text(item, f"{name}[{index}]" if isinstance(given, list) else name, name)
        for index, item in enumerate(texts)
    ]


def _text(given: object, where: str, name: str) -> str:
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
    raise UserError(
        f"{where} is {value_text(given)}, it must be a string, or an object with a text", param=name
    )


def _is_text_part(part: object) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )
