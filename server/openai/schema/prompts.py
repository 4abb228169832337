"""What comes as one text or many, or as token ids: told apart and checked. Knows no tokenizer."""

from typing import Any

from config.errors import UserError

Texts = list[str]
TokenLists = list[list[int]]

_ids = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def prompts_schema(most: int) -> dict[str, Any]:
    """The JSON schema of such a field, of at most so many entries."""
    return {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "maxItems": most},
            _ids,
            {"type": "array", "items": _ids, "maxItems": most},
        ]
    }


def num_ids(given: Any) -> int:
    """The token ids of all entries together; nothing is checked."""
    if not isinstance(given, list) or not given:
        return 0
    if _is_id(given[0]):
        return len(given)
    return sum(len(one) for one in given if isinstance(one, list))


def most_ids(given: Any) -> int:
    """The length of the longest entry of token ids, if there is one; nothing is checked."""
    if not isinstance(given, list) or not given:
        return 0
    lists = [given] if _is_id(given[0]) else [one for one in given if isinstance(one, list)]
    return max(map(len, lists), default=0)


def given_prompts(given: Any, name: str, most: int) -> Texts | TokenLists:
    """One entry or many, all of one kind. Raises UserError about the field `name`."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise _bad(f"{name} is {_kind(given)}, it must be a string, a list of strings, a list "
                   "of token ids, or a list of such lists", name)  # fmt: skip
    if not given:
        raise _bad(f"{name} is an empty list, it must hold at least 1 {name} or token id", name)
    first = given[0]
    if _is_id(first):
        return [_token_ids(given, name, name)]
    if len(given) > most:
        raise _bad(f"{name} has {len(given)} entries, it may have {most}", name)
    if isinstance(first, str):
        for place, one in enumerate(given):
            if not isinstance(one, str):
                raise _bad(f"{name} mixes a string with {_kind(one)} ({name}[{place}])", name)
        return given
    return [_token_ids(one, f"{name}[{place}]", name) for place, one in enumerate(given)]


def _token_ids(given: Any, where: str, name: str) -> list[int]:
    if not isinstance(given, list):
        raise _bad(f"{name} mixes lists of token ids with {_kind(given)} ({where})", name)
    if not given:
        raise _bad(f"{where} is an empty list of token ids", name)
    for token_id in given:
        if not _is_id(token_id):
            raise _bad(f"{where} mixes token ids with {_kind(token_id)}", name)
        if not 0 <= token_id < 2**32:
            raise _bad(
                f"{where} has token id {str(token_id)[:20]}, it is not in the vocabulary", name
            )
    return given


def _is_id(value: object) -> bool:
    return type(value) is int


def _kind(value: object) -> str:
    names = {str: "a string", int: "an integer", float: "a number", bool: "a boolean",
             list: "a list", dict: "an object", type(None): "null"}  # fmt: skip
    return names[type(value)]


def _bad(message: str, name: str) -> UserError:
    return UserError(message, param=name)
