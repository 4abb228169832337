"""Input items, and the chat messages that they become."""

from typing import Any

import pytest

from config.errors import UserError
from server.multimodal.messages import IMAGE
from server.openai.responses.items import ignored_items, number_in, read_items
from server.openai.responses.messages import messages_of

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x":1}'}
THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm"}],
}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
PATCH = {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"}
PATCHED = {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done"}


def messages(*items: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    return messages_of(read_items(list(items), "n"), instructions)


def test_a_text_is_a_user_message() -> None:
    (item,) = read_items("hi", "n")

    assert item == {
        "id": "msg_n_in0",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "hi"}],
    }
    assert number_in(item["id"]) == "n"
    assert messages_of([item]) == [{"role": "user", "content": "hi"}]


def test_items_of_a_model_turn_become_a_single_message() -> None:
    made = messages({"role": "user", "content": "?"}, THOUGHT, SAID, CALL, RESULT)

    assert made == [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "Yes",
            "reasoning_content": "Hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain", "name": "f"},
    ]


@pytest.mark.parametrize("given", ["", "gAAAAAB", "gaudiserve.a", "gaudiserve./w==", 7, None])
def test_encrypted_reasoning_of_other_servers_is_ignored(given: object) -> None:
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": given}

    assert messages(hidden, SAID) == [{"role": "assistant", "content": "Yes"}]


def test_a_new_reasoning_item_begins_a_new_turn() -> None:
    made = messages(THOUGHT, CALL, RESULT, THOUGHT, SAID, THOUGHT, SAID)

    assert [item["role"] for item in made] == ["assistant", "tool", "assistant", "assistant"]
    assert all(item["reasoning_content"] == "Hm" for item in made if item["role"] == "assistant")


def test_text_after_a_call_precedes_its_result() -> None:
    made = messages(SAID, CALL, SAID, RESULT)

    assert [item["role"] for item in made] == ["assistant", "tool"]
    assert made[0]["content"] == "YesYes"


def test_instructions_and_following_system_messages_are_merged() -> None:
    rules = [{"role": role, "content": role} for role in ("developer", "system", "user", "system")]

    made = messages(*rules, instructions="First")

    assert made[0] == {"role": "system", "content": "First\n\ndeveloper\n\nsystem"}
    assert [item["role"] for item in made] == ["system", "user", "system"]


def test_a_truncated_call_is_dropped() -> None:
    made = messages(SAID, {**CALL, "arguments": '{"x', "status": "incomplete"})

    assert made == [{"role": "assistant", "content": "Yes"}]


def test_a_truncated_call_is_kept_if_it_has_a_result() -> None:
    made = messages(SAID, {**CALL, "arguments": '{"x', "status": "incomplete"}, RESULT)

    assert [entry["role"] for entry in made] == ["assistant", "tool"]
    assert made[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x'}


def test_items_of_other_servers_are_left_out() -> None:
    search = {"type": "web_search_call", "id": "ws_1"}
    sound = {"type": "output_audio", "data": "x"}

    made = messages(SAID, search, {**SAID, "content": [sound, *SAID["content"]]})

    assert [entry["content"] for entry in made] == ["Yes", "Yes"]
    assert list(ignored_items([SAID, search, {**SAID, "content": [sound]}])) == [
        "input[1]:web_search_call",
        "input[2].content[0]:output_audio",
    ]


def test_calls_of_custom_tools_are_replayed_with_a_single_argument() -> None:
    made = messages(PATCH, PATCHED)

    function = made[0]["tool_calls"][0]["function"]
    assert function == {"name": "apply_patch", "arguments": {"input": "*** Begin"}}
    assert made[1] == {
        "role": "tool",
        "tool_call_id": "c2",
        "content": "Done",
        "name": "apply_patch",
    }


@pytest.mark.parametrize("arguments", [None, {"x": 1}, 5, '{"x'])
def test_arguments_of_earlier_calls_are_accepted_in_any_form(arguments: Any) -> None:
    (item,) = read_items([{**CALL, "arguments": arguments}], "n")

    assert isinstance(item["arguments"], str)


def test_parts_of_earlier_reasoning_without_text_are_left_out() -> None:
    parts = [{"type": "reasoning_text"}, *THOUGHT["content"], 5]

    made = messages({"type": "reasoning", "summary": None, "content": parts}, SAID)

    assert made == [{"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}]


def test_several_parts_stay_parts_and_results_become_a_single_text() -> None:
    parts = [{"type": "input_text", "text": text} for text in ("a", "b")]

    made = messages({"role": "user", "content": parts}, CALL, {**RESULT, "output": parts})

    assert made[0]["content"] == parts
    assert made[2]["content"] == "ab"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (5, "string or a list"),
        ([5], "input[0] is 5, it must be an object"),
        ([{"role": "tool", "content": "x"}], "role is 'tool', it must be one of"),
        ([{"role": "user"}], "input[0].content is missing, it must be"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "input_text or input_image"),
        ([{"role": "user", "content": [{"type": "what"}]}], "has type 'what', it must be"),
        (
            [{"role": "user", "content": [{"type": "input_text"}]}],
            "input[0].content[0].text is missing",
        ),
        ([{"role": "user", "content": ["x"]}], "input[0].content[0] is 'x', it must be an object"),
        ([{"type": ["message"]}], "it must be one of"),
        ([{"type": "mesage", "role": "user", "content": "x"}], "has type 'mesage', it must be"),
        ([{"type": "input_image", "image_url": "x"}], "has type 'input_image', it must be"),
        ([{"type": "text", "text": "x"}], "has type 'text', it must be"),
        ([{**PATCH, "name": None}], "input[0].name is "),
        ([{**PATCHED, "call_id": ""}], "input[0].call_id is '', it must be a string"),
        ([{**CALL, "call_id": None}], "input[0].call_id is null, it must be a string"),
        ([{**CALL, "name": ""}], "input[0].name is "),
        ([{**RESULT, "output": 3}], "input[0].output is 3, it must be"),
        ([{"type": "item_reference"}], "input[0].id is missing, it must be"),
        ([{**SAID, "id": 5}], "input[0].id is 5, it must be"),
    ],
)
def test_invalid_items_are_refused_with_their_index(given: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_items(given, "n", (IMAGE,))

    assert words in caught.value.message
    assert caught.value.param == caught.value.message.split()[0]
    assert caught.value.param.startswith("input")


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"role": "user"}, "content"),
        ({"type": "function_call_output", "call_id": "c1"}, "output"),
        ({"type": "reasoning"}, "summary"),
        ({"type": "reasoning"}, "content"),
    ],
)
def test_an_item_with_too_many_parts_is_refused(item: dict[str, Any], field: str) -> None:
    words = rf"input\[0\]\.{field} has 16385 parts, at most 16384 are allowed"

    with pytest.raises(UserError, match=words):
        read_items([{**item, field: [{"type": "input_text", "text": ""}] * 16_385}], "n")


def test_empty_and_text_fields_of_other_servers_are_accepted() -> None:
    made = messages(
        {"role": "user", "content": "?"},
        {"type": "reasoning", "summary": "So", "content": None},
        {"type": "message", "role": "assistant", "content": None},
        {"type": "reasoning", "summary": [], "content": "Hm"},
        {**SAID, "content": [{"type": "output_text", "text": None}, *SAID["content"]]},
        CALL,
        {**RESULT, "output": None},
        {"type": "function_call_output", "call_id": "c9"},
    )

    assert [message.get("reasoning_content") for message in made] == [None, "SoHm", None, None]
    assert [message["content"] for message in made] == ["?", "Yes", "", ""]
