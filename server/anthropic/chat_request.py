"""Converts a Messages API body to the equivalent chat request."""

from collections.abc import Iterator, Sequence
from typing import Any

from config.errors import UserError, value_text, wrong_field
from config.json_text import Json
from server.anthropic.schema import CountBody, MessagesBody, is_foreign_tool, is_ignored_block
from server.http.body import validate_fields
from server.http.body_bounds import MAX_PARTS
from server.multimodal.parts import wrong_type
from server.openai.schema.chat import ChatBody, Message
from server.openai.schema.json_schema import untyped
from server.text.hidden_reasoning import hidden_reasoning

_SEPARATOR = "\n"
"""Separator between joined messages of the same role."""
_ROLES = ("user", "assistant", "system")
_BILLING_HEADER = "x-anthropic-billing-header:"
"""Prefix of a line that is removed from the start of system texts."""
Part = Json
"""Content part of a chat message."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat_body(body: CountBody, *, has_reasoning: bool, takes_images: bool = False) -> ChatBody:
    """Convert `body` to a chat request. Raises UserError. `has_reasoning`: whether the server has a
    reasoning parser; without a parser, a reasoning budget is ignored. `takes_images`: whether the
    model supports images."""
    body.check()
    builder = _MessageBuilder(takes_images)
    builder.add_system(body.system)
    for index, message in enumerate(body.messages):
        builder.add(message, f"messages[{index}]")
    if not body.messages or not builder.messages:
        raise _bad("messages is an empty list, it must have at least 1 message")
    continues = builder.close()
    fields: Json = {
        "model": body.model,
        "messages": builder.messages,
        "continue_final_message": continues,
        **_reasoning_fields(body),
    }
    tools = [
        _function(tool, f"tools[{i}]")
        for i, tool in enumerate(body.tools or ())
        if not is_foreign_tool(tool)
    ]
    if tools:
        fields["tools"] = tools
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        # Without tools, auto has no effect.
        if tools or choice.type in ("any", "tool"):
            fields["tool_choice"] = _CHOICES.get(choice.type, named)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if (form := body.form) is not None:
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": form.schema_},
        }
    if isinstance(body, MessagesBody):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "timeout": body.timeout,
            "cache_salt": body.cache_salt,
        }
        if has_reasoning and body.thinking is not None and body.thinking.type == "enabled":
            fields["thinking_token_budget"] = body.thinking.budget_tokens
    return validate_fields(ChatBody, fields)


def _reasoning_fields(body: CountBody) -> Json:
    """Reasoning effort, and the template variables that enable or disable reasoning: templates read
    either `enable_thinking` or `thinking`. The request's chat_template_kwargs override them."""
    thinking = body.thinking
    thinks = thinking is not None and thinking.type != "disabled"
    fields: Json = {
        "chat_template_kwargs": {
            "enable_thinking": thinks,
            "thinking": thinks,
            **(body.chat_template_kwargs or {}),
        }
    }
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
    return fields


def _function(tool: object, where: str) -> Json:
    if not isinstance(tool, dict):
        raise UserError(f"{where} is {value_text(tool)}, it must be an object", param=where)
    if tool.get("type") not in (None, "custom"):
        raise UserError(wrong_field(tool, "type", where, "a string"), param=f"{where}.type")
    if not isinstance(tool.get("input_schema"), dict):
        message = wrong_field(tool, "input_schema", where, "the JSON schema of an object")
        raise UserError(message, param=f"{where}.input_schema")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


class _MessageBuilder:
    """Builds chat messages. Consecutive messages of the same role are joined, except tool
    results."""

    def __init__(self, takes_images: bool) -> None:
        self._taken = ("text", "image") if takes_images else ("text",)
        """Block types that are accepted as content parts of user messages and tool results, besides
        tool_reference in tool results."""
        self.messages: list[Message] = []
        self._tools: dict[str, str] = {}
        """tool_use id -> tool name."""

    def add_system(self, system: str | list[Any] | None) -> None:
        if system:
            self._add_system_text(_blocks(system, "system"))

    def add(self, message: object, where: str) -> None:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            shown = value_text(message)
            if isinstance(message, dict):
                shown += f" with role {value_text(message.get('role'))}"
            raise _bad(
                f"{where} is {shown}, it must be an object whose role is user, assistant or system"
            )
        role, content = message["role"], message.get("content")
        if role == "assistant":
            content = content or []
        if not isinstance(content, (str, list)):
            raise _bad(wrong_field(message, "content", where, "a string or a list of blocks"))
        blocks = _blocks(content, f"{where}.content")
        if role == "user":
            self._add_user(blocks)
        elif role == "assistant":
            self._add_assistant(blocks)
        else:
            self._add_system_text(blocks)

    def close(self) -> bool:
        """Finish all messages. Returns whether the response continues the last message. Raises
        UserError if the last message cannot be answered or continued."""
        last = self.messages[-1]
        if last["role"] == "assistant":
            if last.get("tool_calls"):
                raise _bad("the last message has a tool_use block: send its tool_result after it")
            if not any(part["text"] for part in last["content"]):
                self.messages.pop()
                if last.get("reasoning") or not self.messages:
                    raise _bad(
                        "the last message is an assistant message without text to continue: add "
                        "text, or end with a user message"
                    )
                last = {}
        for message in self.messages:
            parts = message["content"]
            if "reasoning" in message:
                message["reasoning"] = "".join(message["reasoning"])
            if message["role"] == "assistant" and not parts:
                message["content"] = None if message.get("tool_calls") else ""
            elif len(parts) == 1 and "text" in parts[0]:
                message["content"] = parts[0]["text"]
        return last.get("role") == "assistant"

    def _add_system_text(self, blocks: "Iterator[tuple[Any, str]]") -> None:
        parts = []
        for block, where in blocks:
            part = _text(block, where)
            # Claude Code writes this line for gateways. It differs between requests and would break
            # prefix cache hits for all tokens after it.
            if part["text"].startswith(_BILLING_HEADER):
                part["text"] = part["text"].partition("\n")[2]
                if not part["text"]:
                    continue
            parts.append(part)
        if parts:
            self._append("system", parts)

    def _add_user(self, blocks: "Iterator[tuple[Any, str]]") -> None:
        parts: list[Part] = []
        has_results = False
        for block, where in blocks:
            if block["type"] == "tool_result":
                if parts:
                    self._append("user", parts)
                    parts = []
                self.messages.append(self._result(block, where))
                has_results = True
            else:
                parts.append(self._part(block, where, "tool_result"))
        if parts or not has_results:
            self._append("user", parts or [{"type": "text", "text": ""}])

    def _add_assistant(self, blocks: "Iterator[tuple[Any, str]]") -> None:
        parts, calls, reasoning = [], [], []
        for block, where in blocks:
            if block["type"] == "tool_use":
                calls.append(self._call(block, where))
            elif block["type"] == "thinking":
                shown = _string(block, "thinking", where) if block.get("thinking") else ""
                reasoning.append(shown or hidden_reasoning(block.get("signature")))
            elif not is_ignored_block(block):
                parts.append(_text(block, where, ("text", "thinking", "tool_use")))
        message = self._append("assistant", parts)
        if calls:
            message.setdefault("tool_calls", []).extend(calls)
        if reasoning:
            # `close` joins the texts: joining them here would take quadratic time.
            message.setdefault("reasoning", []).extend(reasoning)

    def _part(self, block: Any, where: str, *others: str) -> Part:
        if "image" in self._taken and block["type"] == "image":
            return _image(block, where)
        return _text(block, where, (*self._taken, *others))

    def _append(self, role: str, parts: list[Part]) -> Message:
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != role:
            last = {"role": role, "content": []}
            self.messages.append(last)
        elif parts and last["content"]:
            last["content"].append({"type": "text", "text": _SEPARATOR})
        last["content"] += parts
        return last

    def _call(self, block: Any, where: str) -> Json:
        call_id, name = _string(block, "id", where), _string(block, "name", where)
        self._tools[call_id] = name
        function = {"name": name, "arguments": block.get("input")}
        return {"id": call_id, "type": "function", "function": function}

    def _result(self, block: Any, where: str) -> Message:
        call_id = _string(block, "tool_use_id", where)
        content = block.get("content")
        if not isinstance(content, (str, list, type(None))):
            raise _bad(wrong_field(block, "content", where, "a string or a list of blocks"))
        parts = [
            self._result_part(part, path)
            for part, path in _blocks(content or [], f"{where}.content")
        ]
        if not isinstance(block.get("is_error"), (bool, type(None))):
            raise _bad(wrong_field(block, "is_error", where, "true or false"))
        if block.get("is_error"):
            # Templates have no field for is_error, so put it into the text.
            parts.insert(0, {"type": "text", "text": "Error: "})
        return {
            "role": "tool",
            "tool_call_id": call_id,
            # The client may have dropped the part of the conversation with the call.
            "name": self._tools.get(call_id),
            "content": parts or [{"type": "text", "text": ""}],
        }

    def _result_part(self, block: Any, where: str) -> Part:
        if block["type"] == "tool_reference":
            return {"type": "text", "text": _string(block, "tool_name", where)}
        return self._part(block, where)


def _blocks(content: str | list[Any], where: str) -> Iterator[tuple[Any, str]]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if len(content) > MAX_PARTS:
        raise _bad(f"{where} has {len(content)} blocks, at most {MAX_PARTS} are allowed")
    for number, block in enumerate(content):
        path = f"{where}[{number}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise _bad(untyped(block, path, "text"))
        yield block, path


def _image(block: Any, where: str) -> Part:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        url = _string(source, "url", f"{where}.source")
    elif kind == "base64":
        media_type = _string(source, "media_type", f"{where}.source")
        url = f"data:{media_type};base64,{_string(source, 'data', f'{where}.source')}"
    else:
        raise _bad(wrong_field(block, "source", where, "an object with type 'base64' or 'url'"))
    return {"type": "image_url", "image_url": {"url": url}}


def _text(block: Any, where: str, taken: Sequence[str] = ("text",)) -> Part:
    if block["type"] != "text":
        raise wrong_type(block["type"], where, taken)
    return {"type": "text", "text": _string(block, "text", where)}


def _string(block: Any, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _bad(wrong_field(block, name, where, "a string"))
    return value


def _bad(message: str) -> UserError:
    return UserError(message, param="messages")
