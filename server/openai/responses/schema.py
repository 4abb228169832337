"""Body of /v1/responses, and its conversion to chat fields."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema, model_validator

from config.errors import UserError
from config.json_text import Json
from config.params.sampling import MAX_LOGPROBS
from server.http.body_bounds import (
    Documents,
    Label,
    Metadata,
    SafetyIdentifier,
    Schema,
    Strings,
    ToolChoice,
    Tools,
    Variables,
)
from server.openai.responses.items import PREFIXES, ignored_items
from server.openai.responses.tools import allowed_tools, chat_choice, chat_tools, ignored_tools
from server.openai.schema.generation import (
    UNSUPPORTED,
    Body,
    GenerationBody,
    Integer,
    Unsupported,
    check_at_least,
    check_between,
)
from server.openai.schema.json_schema import (
    NULL,
    OBJECT,
    TEXT,
    any_of,
    array,
    ignored_entries,
    record,
    words,
)
from server.openai.schema.tools import FUNCTION

WITH_LOGPROBS = "message.output_text.logprobs"
WITH_HIDDEN_REASONING = "reasoning.encrypted_content"
INCLUDABLE = (
    WITH_LOGPROBS,
    WITH_HIDDEN_REASONING,
    # Values without effect.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
MOVED = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""Field of /v1/chat/completions -> the corresponding field of /v1/responses."""
_SHOWN = 40

_KINDS = (*PREFIXES, "item_reference")
_ITEM = record(
    {
        "type": {**any_of(TEXT, NULL), "examples": list(_KINDS)},
        "role": words("user", "system", "developer", "assistant"),
        "content": any_of(TEXT, array(OBJECT)),
    }
)
_INPUT = {
    **any_of(TEXT, array(_ITEM), NULL),
    "description": "A text or items; required without previous_response_id.",
}
_TOOL = record(
    {
        "type": {**TEXT, "examples": ["function", "namespace"]},
        **FUNCTION,
        "tools": array(OBJECT),
    },
    required=["type"],
)
_NAMED_CHOICE = record(
    {"type": words("function", "allowed_tools"), "name": TEXT}, required=["type"]
)
_TOOL_CHOICE = any_of(words("none", "auto", "required"), _NAMED_CHOICE, NULL)


class ReasoningOptions(Body):
    """Options for reasoning. Summaries are never generated."""

    effort: Label | None = None
    summary: Label | None = None


class TextOptions(Body):
    """Output format of the text."""

    format: Schema | None = None
    verbosity: Label | None = None


class ResponseBody(GenerationBody):
    """Body of POST /v1/responses."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"input": "What is the capital of Japan?", "max_output_tokens": 64}
        }
    )
    unsupported: ClassVar[Unsupported] = {
        **UNSUPPORTED,
        "best_of": (1,),
        "conversation": (),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": (),
        "length_penalty": (1, 1.0),
        "logprobs": (False,),
        "moderation": (),
        "n": (1,),
        "previous_input_messages": ([],),
        "prompt": (),
        "prompt_logprobs": (),
        "request_id": (),
        "return_token_ids": (False,),
        "suffix": ("",),
        "use_beam_search": (False,),
    }

    prompt_fields: ClassVar[tuple[str, ...]] = (
        "input",
        "documents",
        "chat_template",
        "chat_template_kwargs",
    )

    input: Annotated[Any, WithJsonSchema(_INPUT)] = None
    instructions: str | None = Field(None, description="System prompt of this response only.")
    previous_response_id: Label | None = None
    max_output_tokens: Integer | None = Field(
        None, description="Maximum generated tokens; default: the rest of the context."
    )
    max_tool_calls: Integer | None = Field(
        None, description="No effect: there are no hosted tools."
    )
    top_logprobs: Integer | None = Field(
        None,
        description=f"Number of likeliest tokens per position; needs include: {WITH_LOGPROBS}.",
    )
    include: Strings | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[Tools | None, WithJsonSchema(any_of(array(_TOOL), NULL))] = None
    tool_choice: Annotated[ToolChoice, WithJsonSchema(_TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: Metadata | None = None
    service_tier: Label | None = None
    prompt_cache_key: Label | None = None
    safety_identifier: SafetyIdentifier | None = None
    context_management: Tools | None = Field(None, description="No effect: input is not compacted.")
    documents: Documents | None = None
    chat_template: str | None = None
    chat_template_kwargs: Variables | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Integer | None = None

    @classmethod
    def unknown_fields(cls, data: Mapping[str, Any]) -> list[str]:
        """Names of unknown fields, and of ignored entries of tools, context_management and
        input."""
        return [
            *super().unknown_fields(data),
            *ignored_tools(data.get("tools")),
            *ignored_entries("context_management", data.get("context_management"), bool),
            *ignored_items(data.get("input")),
        ]

    @model_validator(mode="before")
    @classmethod
    def _name_the_moved(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for old, new in MOVED.items():
                if data.get(old) is not None:
                    raise UserError(f"{old} is a field of chat requests; use {new}", param=old)
        return data

    def check(self) -> None:
        super().check()
        if not self.input and not isinstance(self.input, str) and not self.previous_response_id:
            raise UserError(
                "input is missing, it must be a string or at least 1 item", param="input"
            )
        check_at_least(self, "max_output_tokens", 1)
        check_at_least(self, "max_tool_calls", 1)
        for name in self.include or ():
            if name not in INCLUDABLE:
                raise UserError(
                    f"include has {name[:_SHOWN]!r}, it may have {', '.join(INCLUDABLE)}",
                    param="include",
                )
        check_between(self, "top_logprobs", 0, MAX_LOGPROBS)
        if self.top_logprobs and not self.has_logprobs:
            raise UserError(
                f"top_logprobs is {self.top_logprobs}, it must be null or 0 unless include has "
                f"{WITH_LOGPROBS}",
                param="top_logprobs",
            )
        if self.background and self.store is False:
            raise UserError(
                "background is true and store is false, store must be true", param="background"
            )

    @property
    def has_logprobs(self) -> bool:
        """Whether the texts have log-probabilities."""
        return WITH_LOGPROBS in (self.include or ())

    @property
    def hides_reasoning(self) -> bool:
        """Whether reasoning items also have `encrypted_content`."""
        return WITH_HIDDEN_REASONING in (self.include or ())

    @property
    def chat_fields(self) -> Json:
        """Fields of the equivalent chat body, except messages. Raises UserError."""
        shared = {name: getattr(self, name) for name in _SHARED}
        tools, choice = chat_tools(self.tools), chat_choice(self.tool_choice)
        if isinstance(choice, dict) and choice["type"] == "allowed_tools":
            tools, choice = allowed_tools(tools, choice)
        return {
            **shared,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.has_logprobs,
            "top_logprobs": self.top_logprobs if self.has_logprobs else None,
            "response_format": _format(self.text.format if self.text else None),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "tools": tools,
            "tool_choice": choice,
        }


_SHARED = (
    *(set(GenerationBody.model_fields) - {"response_format", "stream_options"}),
    *("parallel_tool_calls", "documents", "chat_template", "chat_template_kwargs"),
    *("include_reasoning", "thinking_token_budget"),
)


def _format(given: Json | None) -> Json | None:
    """`text.format` as the response_format of a chat, where a JSON schema is nested a level
    deeper."""
    if given is None or given.get("type") != "json_schema":
        return given
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in given.items() if name != "type"},
    }
