"""Converts tools of a response to chat tools: functions, and functions in namespaces as
`namespace__name`. Other tools are ignored, since this server does not run tools."""

from collections.abc import Iterator, Mapping
from typing import Any

from config.errors import UserError, wrong_field
from config.json_text import Json
from server.openai.schema.json_schema import ignored_entries, type_of, untyped
from server.openai.schema.tools import check_allowed, check_function, is_foreign_tool

Tool = Json

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_SHOWN = 40


def flat_name(name: object, namespace: object) -> Any:
    """Function name as the model sees it."""
    is_in_namespace = isinstance(namespace, str) and namespace and isinstance(name, str)
    return f"{namespace}__{name}" if is_in_namespace else name


def chat_tools(tools: list[Any] | None) -> list[Tool] | None:
    """The functions as chat tools; None without functions. Raises UserError."""
    functions = []
    for tool, namespace, where in _functions(tools):
        function = {name: tool[name] for name in _FUNCTION_FIELDS if tool.get(name) is not None}
        if "name" in function:
            function["name"] = flat_name(function["name"], namespace)
        functions.append({"type": "function", "function": function})
        check_function(functions[-1], where)
    return functions or None


def namespaced_names(tools: list[Any] | None) -> Mapping[str, tuple[str, str]]:
    """Function name as the model sees it -> (namespace, name), for functions in namespaces, unless
    a function outside of namespaces has the same name. `tools` must have been validated."""
    found, plain = {}, set()
    for tool, namespace, _ in _functions(tools):
        if namespace is None:
            plain.add(tool["name"])
        else:
            found[flat_name(tool["name"], namespace)] = (namespace, tool["name"])
    return {flat: names for flat, names in found.items() if flat not in plain}


def offered_tools(tools: list[Any] | None) -> list[Tool]:
    """The functions and namespaces in `tools`, which must have been validated, for the response
    object."""
    offered = []
    for tool in tools or ():
        if tool["type"] == "function":
            offered.append(_shown(tool))
        elif tool["type"] == "namespace":
            members = [_shown(entry) for entry in tool["tools"] if entry["type"] == "function"]
            offered.append(
                {
                    "type": "namespace",
                    "name": tool["name"],
                    "description": tool.get("description"),
                    "tools": members,
                }
            )
    return offered


def ignored_tools(tools: object) -> Iterator[str]:
    """Names of the tools that are neither functions nor namespaces, for the header of ignored
    fields."""
    yield from ignored_entries("tools", tools, _is_ignored)
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        if type_of(tool) == "namespace":
            yield from ignored_entries(f"tools[{place}].tools", tool.get("tools"), is_foreign_tool)


def chat_choice(choice: object) -> Any:
    """Convert a tool_choice to the tool_choice of a chat; allowed_tools choices are not changed.
    Raises UserError."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        name = flat_name(choice.get("name"), choice.get("namespace"))
        return {"type": "function", "function": {"name": name}}
    if kind == "allowed_tools":
        return choice
    raise UserError(
        f"tool_choice has type {str(kind)[:_SHOWN]!r}, it must be function or allowed_tools",
        param="tool_choice",
    )


def allowed_tools(tools: list[Tool] | None, choice: Tool) -> tuple[list[Tool] | None, Any]:
    """(chat tools that an allowed_tools `choice` permits, its mode: auto or required). `tools`: all
    chat tools. Raises UserError."""
    mode, listed = choice.get("mode"), choice.get("tools")
    if not isinstance(listed, list):
        message = wrong_field(choice, "tools", "tool_choice", "a list of tools")
        raise UserError(message, param="tool_choice")
    allowed = chat_tools(listed)
    names = {tool["function"]["name"] for tool in allowed or ()}
    known = {tool["function"]["name"] for tool in tools or ()}
    check_allowed(mode, names, known, "tool_choice")
    return [tool for tool in tools or () if tool["function"]["name"] in names], mode


def _functions(tools: list[Any] | None) -> Iterator[tuple[Tool, str | None, str]]:
    """(function, namespace, path in the body) for each function. Raises UserError."""
    for place, tool in enumerate(tools or ()):
        where = f"tools[{place}]"
        if _checked_type(tool, where) == "function":
            namespace = tool.get("namespace")
            yield tool, namespace if isinstance(namespace, str) and namespace else None, where
        elif tool["type"] == "namespace":
            name, members = tool.get("name"), tool.get("tools")
            if not isinstance(name, str) or not name:
                message = wrong_field(tool, "name", where, "a string that is not empty")
                raise UserError(message, param=f"{where}.name")
            if not isinstance(members, list):
                message = wrong_field(tool, "tools", where, "a list")
                raise UserError(message, param=f"{where}.tools")
            for position, member in enumerate(members):
                path = f"{where}.tools[{position}]"
                if _checked_type(member, path) == "function":
                    yield member, name, path


def _checked_type(tool: object, where: str) -> str:
    kind = type_of(tool)
    if kind is None:
        param = f"{where}.type" if isinstance(tool, dict) else where
        raise UserError(untyped(tool, where, "function"), param=param)
    return kind


def _is_ignored(tool: Any) -> bool:
    return is_foreign_tool(tool) and type_of(tool) != "namespace"


def _shown(tool: Tool) -> Tool:
    return {name: tool.get(name) for name in ("type", *_FUNCTION_FIELDS)}
