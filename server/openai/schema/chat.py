"""Body of /v1/chat/completions, and validation of its messages."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from config.errors import UserError, error_at_path, value_text, wrong_field
from config.json_text import Json
from config.params.sampling import MAX_LOGPROBS
from config.params.structured_output import GrammarSpec
from server.http.body_bounds import (
    MAX_PARTS,
    Documents,
    Label,
    Messages,
    Metadata,
    SafetyIdentifier,
    Strings,
    ToolChoice,
    Tools,
    Variables,
)
from server.multimodal.parts import PART_TYPES, kind_of, media_source, wrong_type
from server.openai.schema.generation import (
    UNSUPPORTED,
    Body,
    GenerationBody,
    Integer,
    OtherRoutes,
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
    constant,
    ignored_entries,
    record,
    untyped,
)
from server.openai.schema.structured import spec_of_schema
from server.openai.schema.tools import (
    TOOL_CHOICE_SCHEMA,
    TOOLS_SCHEMA,
    check_tools,
    choice_among,
    forced_schema,
    functions_of,
    is_foreign_tool,
    name_of,
    without_others,
)
from server.text.messages import is_ignored_call, is_ignored_part

Message = Json

MAX_ECHO_CHARACTERS = 2**24
"""Maximum total characters of the echoed message over all choices."""

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Text part type -> key of the text."""

_MESSAGE = record(
    {
        "role": {**TEXT, "examples": ["system", "user", "assistant", "tool"]},
        # A text in the list counts as a part, as in vLLM.
        "content": any_of(
            TEXT, array(any_of(record({"type": constant("text"), "text": TEXT}), TEXT)), NULL
        ),
        "name": any_of(TEXT, NULL),
        "tool_calls": any_of(array(OBJECT), NULL),
        "tool_call_id": any_of(TEXT, NULL),
    },
    required=["role"],
)


class ChatPromptBody(Body):
    """The fields that determine the prompt of a chat, shared by chat, /tokenize and the pooling
    routes."""

    prompt_fields: ClassVar[tuple[str, ...]] = (
        "messages",
        "documents",
        "chat_template",
        "chat_template_kwargs",
    )

    messages: Annotated[Messages, WithJsonSchema(array(_MESSAGE, minItems=1))]
    tools: Annotated[Tools | None, WithJsonSchema(TOOLS_SCHEMA)] = None
    tool_choice: Annotated[ToolChoice, WithJsonSchema(TOOL_CHOICE_SCHEMA)] = None
    documents: Documents | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Variables | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )

    @classmethod
    def unknown_fields(cls, data: Mapping[str, Any]) -> list[str]:
        """Names of unknown fields, and of ignored tools, content parts and tool calls."""
        return [
            *super().unknown_fields(data),
            *ignored_entries("tools", data.get("tools"), is_foreign_tool),
            *_ignored_parts(data.get("messages")),
        ]

    def check_conversation(self, *, trust_template: bool, kinds: Collection[bytes] = ()) -> None:
        """Validate messages, tools and template fields. `kinds`: supported media besides text.
        Raises UserError."""
        check_messages(self.messages, kinds)
        check_tools(self.tools, self.tool_choice)
        if self.chat_template is not None and not trust_template:
            raise UserError(
                "chat_template is not trusted by this server; start it with "
                "--trust-request-chat-template, or leave chat_template out",
                param="chat_template",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise UserError(
                "continue_final_message and add_generation_prompt cannot both be true",
                param="continue_final_message",
            )

    def has_more_than(self, num_pieces: int) -> bool:
        """Whether there are more than `num_pieces` messages and content parts."""
        if len(self.messages) > num_pieces:
            return True
        contents = [
            message.get("content") for message in self.messages if isinstance(message, dict)
        ]
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        return len(self.messages) + num_parts > num_pieces

    @property
    def text(self) -> str:
        """Concatenated text of all messages, which must have been validated."""
        return "".join(map(_text_of, self.messages))

    @property
    def last_text(self) -> str:
        """Text of the last message, which must have been validated."""
        return _text_of(self.messages[-1])

    @property
    def visible_tools(self) -> list[Any] | None:
        """Functions that the model sees; None without functions or if tool_choice is none."""
        if self.tool_choice == "none":
            return None
        return without_others(functions_of(self.tools), self.tool_choice) or None

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the prompt ends with the header of an assistant message."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def template_variables(self, defaults: Mapping[str, Any]) -> Json:
        """Template variables: `defaults`, then the variables that reasoning_effort sets, then
        chat_template_kwargs; later values take precedence."""
        variables = dict(defaults)
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            variables["enable_thinking"] = self.reasoning_effort != "none"
        return {**variables, **(self.chat_template_kwargs or {})}


class ChatBody(ChatPromptBody, GenerationBody):
    """A conversation to answer."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
                "max_tokens": 64,
            }
        }
    )
    unsupported: ClassVar[Unsupported] = {
        **UNSUPPORTED,
        "best_of": (1,),
        "functions": (),
        "function_call": ("none", "auto"),
        "suffix": ("",),
    }
    other_routes: ClassVar[OtherRoutes] = {"prompt": ("messages", "/v1/completions")}
    schema_fields: ClassVar[tuple[str, ...]] = (
        *GenerationBody.schema_fields,
        "tools",
        "tool_choice",
    )

    max_completion_tokens: Integer | None = Field(
        None, description="Maximum generated tokens; takes precedence over max_tokens."
    )
    max_tokens: Integer | None = Field(
        None, description="Maximum generated tokens; default: the rest of the context."
    )
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Integer | None = Field(None, description="Maximum reasoning tokens.")
    modalities: Strings | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    service_tier: Label | None = None
    prompt_cache_key: Label | None = None
    safety_identifier: SafetyIdentifier | None = None
    verbosity: Label | None = None

    def check_conversation(self, *, trust_template: bool, kinds: Collection[bytes] = ()) -> None:
        """Validate the conversation, and the size of its echoes. Raises UserError."""
        super().check_conversation(trust_template=trust_template, kinds=kinds)
        if not self.echo:
            return
        num_choices = self.n or 1
        num_characters = len(self.last_text)
        if num_characters * num_choices > MAX_ECHO_CHARACTERS:
            raise UserError(
                f"the last message has {num_characters} characters, "
                f"{num_characters * num_choices} for {num_choices} choices with echo, at most "
                f"{MAX_ECHO_CHARACTERS} are allowed",
                param="echo",
            )

    def check(self) -> None:
        super().check()
        check_tools(self.tools, self.tool_choice)
        if self.requires_call and (constraint := super().constraint) is not None:
            raise UserError(
                f"{constraint[0]} cannot be combined with a tool_choice that requires a call: its "
                f"arguments are the answer; leave out {constraint[0]}, or set tool_choice to none",
                param=constraint[0],
            )
        check_at_least(self, "thinking_token_budget", 0)
        check_at_least(self, "max_completion_tokens", 1)
        check_at_least(self, "max_tokens", 1)
        check_between(self, "top_logprobs", 0, MAX_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            raise UserError(
                f"top_logprobs is {self.top_logprobs}, it must be null or 0 unless logprobs is "
                "true",
                param="top_logprobs",
            )
        if self.modalities is not None and self.modalities != ["text"]:
            raise UserError(
                f"modalities is {self.modalities!r:.40}, it must be ['text']: only text is "
                "generated",
                param="modalities",
            )

    @property
    def constraint(self) -> tuple[str, GrammarSpec] | None:
        """(field, grammar) that constrain the output; None: no constraint. If tool_choice requires
        a call, the grammar of the tool calls. Raises UserError."""
        if self.visible_tools is not None:
            parallel = self.parallel_tool_calls is not False
            forced = forced_schema(self.visible_tools, self.visible_choice, is_parallel=parallel)
            if forced is not None:
                return "tools", spec_of_schema("tools", forced)
        return super().constraint

    @property
    def requires_call(self) -> bool:
        """Whether tool_choice requires a call."""
        return self.visible_tools is not None and not self.may_call

    @property
    def may_call(self) -> bool:
        """Whether tool_choice lets the model choose to call a tool or not."""
        return self.visible_tools is not None and self.visible_choice in (None, "auto")

    @property
    def visible_choice(self) -> ToolChoice:
        """The tool_choice; for allowed_tools, its mode, because `visible_tools` has only the
        allowed tools."""
        return choice_among(self.tool_choice)

    @property
    def max_calls(self) -> int | None:
        """Maximum number of calls in an answer; None: no limit."""
        return 1 if self.parallel_tool_calls is False else None

    @property
    def continued_text(self) -> str | None:
        """Text that the answer continues; None without continue_final_message."""
        return self.last_text if self.continue_final_message else None

    def wants_reasoning(self, defaults: Mapping[str, Any]) -> bool:
        """Whether the template enables reasoning: False if a template variable disables it (see
        `template_variables`)."""
        variables = self.template_variables(defaults)
        return all(variables.get(name) is not False for name in ("enable_thinking", "thinking"))

    @property
    def forced_name(self) -> str | None:
        """Name of the function that tool_choice names, if any."""
        return name_of(self.tool_choice)

    @property
    def limit(self) -> int | None:
        """Maximum generated tokens of a choice; None: the request sets no limit."""
        limit: int | None = getattr(self, self.limit_field)
        return limit

    @property
    def limit_field(self) -> str:
        """Name of the field that sets `limit`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """Number of top log-probabilities; None: not requested; 0: only the chosen token."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(
        part if isinstance(part, str) else part[TEXT_PARTS[part["type"]]]
        for part in content
        if isinstance(part, str) or part.get("type") in TEXT_PARTS
    )


def _ignored_parts(messages: object) -> Iterator[str]:
    for place, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and message.get("role") == "assistant":
            for field, is_ignored in (
                ("content", is_ignored_part),
                ("tool_calls", is_ignored_call),
            ):
                where = f"messages[{place}].{field}"
                yield from ignored_entries(where, message.get(field), is_ignored)


def check_messages(messages: list[Any], kinds: Collection[bytes] = ()) -> None:
    """Raise UserError for invalid messages. Images and videos are accepted only if they are in
    `kinds`."""
    if not messages:
        raise error_at_path("messages is an empty list, it must have at least 1 message")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]", kinds)


def _check_message(message: object, where: str, kinds: Collection[bytes]) -> None:
    if not isinstance(message, dict):
        raise error_at_path(f"{where} is {value_text(message)}, it must be an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise error_at_path(wrong_field(message, "role", where, "a string such as 'user'"))
    content = message.get("content")
    calls = message.get("tool_calls")
    if calls is not None:
        _check_calls(calls, f"{where}.tool_calls")
    for field in ("name", "tool_call_id"):
        if not isinstance(message.get(field), str | None):
            raise error_at_path(wrong_field(message, field, where, "a string"))
    # A user message without content most likely has a misspelt field.
    if role == "user" and "content" not in message:
        raise error_at_path(wrong_field(message, "content", where, "a string or a list of parts"))
    # Like vLLM, accept other messages without content, and tool results without an id.
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise error_at_path(wrong_field(message, "content", where, "a string or a list of parts"))
    _check_many(content, f"{where}.content")
    taken = ("text", *(PART_TYPES[kind] for kind in kinds))
    for number, part in enumerate(content):
        path = f"{where}.content[{number}]"
        if kinds and kind_of(part) in kinds:
            media_source(part, path)
        elif not isinstance(part, str) and not (role == "assistant" and is_ignored_part(part)):
            part_text(part, path, taken)


def _check_many(entries: list[Any], where: str) -> None:
    if len(entries) > MAX_PARTS:
        raise error_at_path(f"{where} has {len(entries)} entries, at most {MAX_PARTS} are allowed")


def part_text(part: Any, where: str, taken: Sequence[str]) -> tuple[str, str]:
    """(type, text) of a content part. Raises UserError for a part without text. `taken`: part types
    that are accepted at `where`, for the error."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise error_at_path(untyped(part, where, taken[0]))
    if kind not in TEXT_PARTS:
        raise wrong_type(kind, where, taken)
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise error_at_path(wrong_field(part, TEXT_PARTS[kind], where, "a string"))
    return kind, text


def _check_calls(calls: object, where: str) -> None:
    if not isinstance(calls, list):
        raise error_at_path(f"{where} is {value_text(calls)}, it must be a list")
    _check_many(calls, where)
    for number, call in enumerate(calls):
        if is_ignored_call(call):
            continue
        function = call.get("function") or call.get("custom") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise error_at_path(f"{where}[{number}] has no function.name, it must be a string")
