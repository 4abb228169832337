"""Validation of tools and tool_choice, and the JSON schema of forced calls."""

from collections.abc import Collection, Mapping
from typing import Any

from config.errors import UserError, value_text, wrong_field
from config.json_text import Json
from server.openai.schema.json_schema import (
    NULL,
    OBJECT,
    TEXT,
    Schema,
    any_of,
    array,
    constant,
    record,
    type_of,
    untyped,
    words,
)
from server.parsers.tool.structural_tag import MAX_CALLS, calls_schema, object_schema

Tool = Json
Choice = Any
"""A tool_choice, which may be any value before `check_tools`."""

MAX_TOOL_NAME_CHARACTERS = 256
_SHOWN, _SHOWN_NAMES = 40, 200
_CHOICES = ("none", "auto")
_TYPE = {"type": "function"}

FUNCTION = {"name": TEXT, "description": TEXT, "parameters": OBJECT, "strict": {"type": "boolean"}}


def _of_function(properties: dict[str, Schema]) -> Schema:
    function = record(properties, required=["name"])
    return record({"type": constant("function"), "function": function}, required=["function"])


_FOREIGN = record({"type": {**TEXT, "not": constant("function")}}, required=["type"])
"""Schema of a tool of another type, which is ignored and listed in the header of ignored fields."""
TOOLS_SCHEMA = any_of(array(any_of(_of_function(FUNCTION), _FOREIGN), minItems=1), NULL)
_ALLOWED = record(
    {
        "type": constant("allowed_tools"),
        "allowed_tools": record(
            {
                "mode": words("auto", "required"),
                "tools": array(_of_function({"name": TEXT}), minItems=1),
            },
            required=["mode", "tools"],
        ),
    },
    required=["type", "allowed_tools"],
)
TOOL_CHOICE_SCHEMA = {
    **any_of(words("none", "auto", "required"), _of_function({"name": TEXT}), _ALLOWED, NULL),
    "description": "auto (default with tools): the model chooses; required, or a function: it "
    "must call; allowed_tools: it sees only these.",
}


def is_foreign_tool(tool: Any) -> bool:
    """Whether `tool` is ignored because it is not a function, such as a hosted tool."""
    return type_of(tool) not in (None, "function")


def functions_of(tools: list[Any] | None) -> list[Any]:
    """The functions among validated `tools`. A missing type is added, because templates show it."""
    functions = [tool for tool in tools or () if not is_foreign_tool(tool)]
    return [tool if tool.get("type") else {**_TYPE, **tool, **_TYPE} for tool in functions]


def check_tools(tools: list[Any] | None, choice: Choice) -> None:
    """Raise UserError for invalid tools, or for a choice that does not match them."""
    if tools is not None and not tools:
        raise _bad("tools is an empty list, it must be left out or have at least 1 tool")
    names = {
        check_function(tool, f"tools[{index}]")
        for index, tool in enumerate(tools or ())
        if not is_foreign_tool(tool)
    }
    if choice is None or choice in _CHOICES:
        return
    if type_of(choice) == "allowed_tools":
        _check_allowed_tools(choice, names)
        return
    named = name_of(choice)
    if is_foreign_tool(choice):
        raise _bad_choice(
            f"tool_choice has type {type_of(choice)!r:.80}, it must be function or allowed_tools"
        )
    if choice != "required" and named is None:
        raise _bad_choice(
            f"tool_choice is {value_text(choice)}, it must be none, auto, required or an object "
            "that names a function"
        )
    if not names:
        shown = value_text(choice)
        raise _bad_choice(
            f"tool_choice is {shown} and there are no tools to call, it must be none or auto"
        )
    if named is not None and named not in names:
        known = ", ".join(sorted(names))[:_SHOWN_NAMES]
        raise _bad_choice(
            f"tool_choice names {value_text(named)}, it must name one of tools: {known}"
        )


def check_allowed(
    mode: object, allowed: Collection[str], known: Collection[str], where: str
) -> None:
    """Raise UserError unless the `mode` of a choice of `allowed` tools is valid, and it allows at
    least 1 tool and only `known` tools. `where`: path of the object that lists them."""
    if mode not in ("auto", "required"):
        shown = str(mode)[:_SHOWN]
        raise _bad_choice(f"{where} has mode {shown!r}, it must be auto or required")
    num_unknown = len(set(allowed) - set(known))
    if not allowed or num_unknown:
        raise _bad_choice(
            f"{where}.tools names {len(allowed)} functions, {num_unknown} of them not in tools: "
            "name at least 1 function, each from tools"
        )


def without_others(functions: list[Tool], choice: Choice) -> list[Tool]:
    """The `functions` that a validated allowed_tools choice names; all `functions` for any other
    choice."""
    if type_of(choice) != "allowed_tools":
        return functions
    allowed = _allowed_names(choice["allowed_tools"]["tools"])
    return [tool for tool in functions if tool["function"]["name"] in allowed]


def choice_among(choice: Choice) -> Choice:
    """`choice`, or the mode of an allowed_tools choice (see `without_others`)."""
    return choice["allowed_tools"]["mode"] if type_of(choice) == "allowed_tools" else choice


def _check_allowed_tools(choice: Tool, known: Collection[str]) -> None:
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        raise _bad_choice(wrong_field(choice, "allowed_tools", "tool_choice", "an object"))
    where, listed = "tool_choice.allowed_tools", allowed.get("tools")
    if not isinstance(listed, list):
        raise _bad_choice(wrong_field(allowed, "tools", where, "a list of tools"))
    for index, tool in enumerate(listed):
        if not is_foreign_tool(tool) and name_of(tool) is None:
            raise _bad_choice(f"{where}.tools[{index}] must be an object that names a function")
    check_allowed(allowed.get("mode"), _allowed_names(listed), known, where)


def _allowed_names(listed: list[Tool]) -> set[str]:
    return {name for tool in listed if (name := name_of(tool)) is not None}


def name_of(choice: Choice) -> str | None:
    """Name of the function that tool_choice names, if any."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    is_function = isinstance(choice, dict) and choice.get("type") in (None, "function")
    return name if isinstance(name, str) and is_function else None


def forced_schema(tools: list[Any], choice: Choice, *, is_parallel: bool) -> Json | None:
    """Schema of an answer with forced calls: the arguments of the function that `choice` names, or
    a list of calls. None if no call is required. The tools must have been validated."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    named = name_of(choice)
    if named is not None:
        return object_schema(functions[named].get("parameters"))
    if choice != "required":
        return None
    schemas = {name: function.get("parameters") for name, function in functions.items()}
    return calls_schema(schemas, max_calls=MAX_CALLS if is_parallel else 1)


def check_function(tool: object, where: str) -> str:
    """Validate the function at the path `where`, and return its name. Raises UserError with the
    path of the invalid field."""
    if not isinstance(tool, dict) or tool.get("type") not in (None, "function"):
        shown = untyped(tool, where, "function") if not type_of(tool) else ""
        message = shown or f"{where} has type {type_of(tool)!r}, it must be 'function'"
        raise _bad(message, f"{where}.type" if isinstance(tool, dict) else where)
    function, path = tool.get("function"), f"{where}.function"
    if not isinstance(function, dict):
        raise _bad_field(tool, "function", where, "an object")
    name = function.get("name")
    # vLLM accepts any string. Names of MCP tools have dots, and names from other clients have
    # blanks.
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise _bad_field(function, "name", path, "a string of visible characters")
    if len(name) > MAX_TOOL_NAME_CHARACTERS:
        raise _bad(
            f"{path}.name has {len(name)} characters, at most {MAX_TOOL_NAME_CHARACTERS} are "
            "allowed",
            f"{path}.name",
        )
    if not isinstance(function.get("description"), (str, type(None))):
        raise _bad_field(function, "description", path, "a string")
    _check_parameters(function, path)
    if not isinstance(function.get("strict"), (bool, type(None))):
        raise _bad_field(function, "strict", path, "true or false")
    return name


def _check_parameters(function: Mapping[str, object], where: str) -> None:
    schema, path = function.get("parameters"), f"{where}.parameters"
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise _bad_field(function, "parameters", where, "the JSON schema of an object")
    if schema.get("type", "object") != "object":
        raise _bad_field(schema, "type", path, "'object'")
    if not isinstance(schema.get("properties", {}), dict):
        raise _bad_field(schema, "properties", path, "an object")


def _bad(message: str, param: str = "tools") -> UserError:
    return UserError(message, param=param)


def _bad_field(parent: Mapping[str, object], field: str, where: str, wanted: str) -> UserError:
    return _bad(wrong_field(parent, field, where, wanted), f"{where}.{field}")


def _bad_choice(message: str) -> UserError:
    return UserError(message, param="tool_choice")
