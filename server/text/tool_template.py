"""Generic tool format for chat templates without tool support: tools, calls and results are
rendered as text of ordinary messages, in the format that the `hermes` parser reads."""

from collections.abc import Callable
from typing import Any

from config.json_text import Json
from server.text.messages import Message, joined_contents

INSTRUCTIONS = """\
You can call the functions listed between <tools> and </tools>, one JSON object per line.
The value of "parameters" is the JSON schema of a function's arguments.
<tools>
{tools}
</tools>
To call a function, write a block of this form, one for each call, and end your answer there:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>
You then receive each result between <tool_response> and </tool_response>.
If you need no function, answer with text only."""


JsonWriter = Callable[[Any], str]


def has_tool_messages(messages: list[Message]) -> bool:
    """Whether a message contains a tool call or a tool result."""
    return any(message.get("role") == "tool" or message.get("tool_calls") for message in messages)


def with_tools_as_text(
    messages: list[Message],
    tools: list[Json] | None,
    *,
    takes_system: bool,
    to_json: JsonWriter,
) -> list[Message]:
    """The normalized `messages`, with tools, tool calls and results rendered as text.

    The tools are appended to the system message, which is added if there is none. Without
    `takes_system` (a template that rejects the role), they precede the text of the first message.
    Results become user messages, because such a template does not know the role `tool`. A result or
    user message directly after a result is joined to it, because many templates require user and
    assistant to alternate.
    """
    rendered: list[Message] = []
    follows_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result:
            before, after = "<tool_response>\n", "\n</tool_response>"
            message = {
                "role": "user",
                "content": joined_contents(before, message["content"], after),
            }
        elif message.get("tool_calls"):
            message = _with_calls_as_text(message, to_json)
        if follows_result and message.get("role") == "user":
            content = joined_contents(rendered[-1]["content"], "\n", message["content"])
            rendered[-1] = {**rendered[-1], "content": content}
        else:
            rendered.append(message)
        follows_result = is_result
    if not tools:
        return rendered
    text = INSTRUCTIONS.format(tools="\n".join(_tool_text(tool, to_json) for tool in tools))
    first, *rest = rendered
    if first.get("role") == "system":
        return [_appended(first, text, "\n\n"), *rest]
    if takes_system:
        return [{"role": "system", "content": text}, *rendered]
    return [{**first, "content": joined_contents(f"{text}\n\n", first["content"])}, *rest]


def _tool_text(tool: Json, to_json: JsonWriter) -> str:
    # `strict` is for the server, which enforces it.
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return to_json({"type": "function", "function": function})


def _with_calls_as_text(message: Message, to_json: JsonWriter) -> Message:
    functions = [call.get("function", {}) for call in message["tool_calls"]]
    calls = [
        {"name": function.get("name"), "arguments": function.get("arguments", {})}
        for function in functions
    ]
    blocks = [f"<tool_call>\n{to_json(call)}\n</tool_call>" for call in calls]
    fields = {name: value for name, value in message.items() if name != "tool_calls"}
    return _appended(fields, "\n".join(blocks), "\n")


def _appended(message: Message, text: str, separator: str) -> Message:
    before = message["content"]
    return {**message, "content": joined_contents(before, separator, text) if before else text}
