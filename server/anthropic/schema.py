"""Bodies of the Messages API."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from config.errors import UserError
from server.http.body_bounds import (
    Blocks,
    Label,
    Messages,
    Schema,
    Strings,
    Tools,
    UserId,
    Variables,
)
from server.openai.schema.generation import Body, Integer, Unsupported, check_at_least, check_stops
from server.openai.schema.json_schema import (
    NULL,
    OBJECT,
    TEXT,
    any_of,
    array,
    ignored_entries,
    record,
    type_of,
    words,
)

_BLOCK = record(
    {
        "type": {**TEXT, "examples": ["text", "tool_use", "tool_result", "thinking"]},
        "text": TEXT,
    },
    required=["type"],
)
_CONTENT = any_of(TEXT, array(_BLOCK))
_MESSAGE = record(
    {"role": words("user", "assistant", "system"), "content": _CONTENT},
    required=["role", "content"],
)
_TOOL = record(
    {"name": TEXT, "description": TEXT, "input_schema": OBJECT}, required=["name", "input_schema"]
)
_KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}


def is_foreign_tool(tool: Any) -> bool:
    """Whether `tool` has a type other than custom, such as web_search_20250305, which
    Anthropic runs. These tools are ignored."""
    return type_of(tool) not in (None, "custom")


def is_ignored_block(block: Any) -> bool:
    """Whether a block of an assistant message is ignored: a block with a type other than text,
    thinking, tool_use and image, such as redacted_thinking, or a text block whose text is null. A
    block without a type is not ignored."""
    kind = type_of(block)
    if kind == "text":
        return block.get("text") is None
    return kind not in (None, "thinking", "tool_use", "image")


class ToolChoice(Body):
    """Whether a tool must be used, and which tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingChoice(Body):
    """Whether the model reasons before it answers, and how the response shows the reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = None
    display: Literal["summarized", "omitted"] | None = None


class ContextManagement(Body):
    """Context edits, which have no effect: this server never edits the prompt."""

    edits: Tools | None = None


class OutputFormat(Body):
    """Required format of the text."""

    schema_: Schema = Field(alias="schema")
    type: Literal["json_schema"] | None = "json_schema"


class OutputConfig(Body):
    """Reasoning effort and output format."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class RequestMetadata(Body):
    """The end user behind the request."""

    user_id: UserId | None = None


class CountBody(Body):
    """Body of POST /v1/messages/count_tokens: the conversation and the fields that affect the
    prompt."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
        }
    )
    unsupported: ClassVar[Unsupported] = {
        "container": (),
        "kv_transfer_params": ({},),
        "mcp_servers": ([],),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    model: str | None = Field(None, description="A served name; default: the first.")
    messages: Annotated[Messages, WithJsonSchema(array(_MESSAGE, minItems=1))]
    system: Annotated[str | Blocks | None, WithJsonSchema(any_of(_CONTENT, NULL))] = None
    tools: Annotated[Tools | None, WithJsonSchema(any_of(array(_TOOL), NULL))] = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="Same as output_config.format.")
    context_management: ContextManagement | None = Field(
        None, description="No effect: prompts are not edited."
    )
    chat_template_kwargs: Variables | None = None

    @classmethod
    def unknown_fields(cls, data: Mapping[str, Any]) -> list[str]:
        """Names of unknown fields, and of ignored tools, context edits and blocks."""
        ignored = super().unknown_fields(data)
        ignored += ignored_entries("tools", data.get("tools"), is_foreign_tool)
        management = data.get("context_management")
        if isinstance(management, dict):
            name, edits = "context_management.edits", management.get("edits")
            ignored += ignored_entries(name, edits, lambda edit: edit != _KEEP_ALL)
        messages = data.get("messages")
        for place, message in enumerate(messages if isinstance(messages, list) else ()):
            if isinstance(message, dict) and message.get("role") == "assistant":
                content, name = message.get("content"), f"messages[{place}].content"
                ignored += ignored_entries(name, content, is_ignored_block)
        return ignored

    def check(self) -> None:
        """Check what the field types do not check. Raises UserError."""
        choice, thinking = self.tool_choice, self.thinking
        if choice is not None and choice.type == "tool" and choice.name is None:
            raise UserError(
                "tool_choice.name is missing, it must be set if tool_choice.type is tool",
                param="tool_choice",
            )
        if thinking is not None and thinking.type == "enabled":
            budget = thinking.budget_tokens
            if budget is None or budget < 1:
                raise UserError(
                    f"thinking.budget_tokens is {budget}, it must be at least 1", param="thinking"
                )
        if self.output_format is not None and self.form is not self.output_format:
            raise UserError(
                "output_format and output_config.format are set, only one of them may be set",
                param="output_format",
            )

    @property
    def form(self) -> OutputFormat | None:
        """Output format from output_config.format, or from output_format."""
        config = self.output_config
        return self.output_format if config is None or config.format is None else config.format


class MessagesBody(CountBody):
    """Body of POST /v1/messages: a conversation to answer."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "max_tokens": 64,
                "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
            }
        }
    )

    max_tokens: Integer
    stop_sequences: Strings | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    metadata: RequestMetadata | None = None
    service_tier: Label | None = None
    timeout: float | None = None
    cache_salt: str | None = None

    def check(self) -> None:
        super().check()
        check_at_least(self, "max_tokens", 1)
        check_stops(self.stop_sequences, "stop_sequences")
