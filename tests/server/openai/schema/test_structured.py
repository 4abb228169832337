"""Fields that constrain an output: the resulting specs, and refusals by name."""

import asyncio
import json
import math
from typing import Any

import msgspec
import pytest
from http_rig import TalkingClient, in_memory, on_port
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import WAIT_S

from config.errors import UserError
from config.params import structured_output
from config.params.structured_output import GrammarSpec
from server.serving import job

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TEXT = '{"type":"object","properties":{"b":{},"a":{}}}'
TAGS_TEXT = '{"structures":[{"begin":"<","schema":{},"end":">"}],"triggers":["<"]}'
TAGS = {"structures": [{"begin": "<", "schema": {}, "end": ">"}], "triggers": ["<"]}


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", **fields}}}


class CompilingClient(TalkingClient):
    """Records what it was asked to compile; refuses the regex `(`."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[GrammarSpec] = []
        self.clients: list[str] = []

    async def control(self, name: str, **arguments: Any) -> Any:
        assert name == "compile_grammar"
        spec = msgspec.convert(arguments["spec"], GrammarSpec)
        self.compiled.append(spec)
        self.clients.append(arguments["client"])
        if spec.text == "(":
            raise UserError("the regular expression cannot be compiled")


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        (json_schema(schema=SCHEMA, strict=True), GrammarSpec("json", TEXT)),
        (json_schema(schema=SCHEMA), GrammarSpec("json", TEXT)),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, GrammarSpec("json", TEXT)),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, GrammarSpec("json", TEXT)),
        ({"structured_outputs": {"json": TEXT}}, GrammarSpec("json", TEXT)),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec("json_object")),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
        ({"structured_outputs": {"choice": ["é", "n"]}}, GrammarSpec("choice", '["é","n"]')),
        ({"structured_outputs": {"grammar": "start: A"}}, GrammarSpec("grammar", "start: A")),
        ({"guided_json": SCHEMA}, GrammarSpec("json", TEXT)),
        ({"guided_json": TEXT}, GrammarSpec("json", TEXT)),
        ({"guided_json_object": True}, GrammarSpec("json_object")),
        ({"guided_regex": "a+"}, GrammarSpec("regex", "a+")),
        ({"guided_choice": ["y"]}, GrammarSpec("choice", '["y"]')),
        ({"guided_grammar": "root ::= x"}, GrammarSpec("grammar", "root ::= x")),
        ({"json_schema": SCHEMA}, GrammarSpec("json", TEXT)),
        ({"json_schema": TEXT}, GrammarSpec("json", TEXT)),
        ({"regex": "a+"}, GrammarSpec("regex", "a+")),
        ({"ebnf": "root ::= x"}, GrammarSpec("grammar", "root ::= x")),
        ({"grammar": "root ::= x"}, GrammarSpec("grammar", "root ::= x")),
        ({"structural_tag": TAGS}, GrammarSpec("structural_tag", TAGS_TEXT)),
        ({"response_format": {"type": "text"}, "guided_json_object": False}, None),
    ],
    ids=str,
)
async def test_every_field_becomes_a_spec_that_is_compiled_and_sent(
    fields: dict[str, Any], spec: GrammarSpec | None
) -> None:
    client = CompilingClient()
    async with in_memory(client) as rig:
        for answer in (await rig.chat(**fields), await rig.complete(**fields)):
            assert answer.status_code == 200, answer.text

    assert client.compiled == ([] if spec is None else [spec] * 2)
    assert [queue.sampling.structured_outputs for queue in client.queues] == [spec] * 2


async def test_a_structural_tag_keeps_its_own_fields() -> None:
    client = CompilingClient()
    async with in_memory(client) as rig:
        await rig.chat(response_format={"type": "structural_tag", **TAGS})
        await rig.chat(structured_outputs={"structural_tag": TAGS})

    first, second = (queue.sampling.structured_outputs for queue in client.queues)
    assert first is not None and first.kind == "structural_tag"
    assert first == second


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
         "response_format.json_schema.name"),
        (json_schema(), "response_format.json_schema.schema"),
        (json_schema(schema="text"), "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"regex": "("}, "regex"),
        ({"ebnf": ""}, "ebnf"),
        ({"grammar": 5}, "grammar"),
        ({"json_schema": "no JSON"}, "json_schema"),
        ({"regex": "a", "structured_outputs": {"regex": "a"}}, "regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
    ids=str,
)  # fmt: skip
async def test_invalid_constraints_are_a_400_with_the_field_before_a_stream_begins(
    fields: dict[str, Any], param: str, stream: bool
) -> None:
    client = CompilingClient()
    async with in_memory(client) as rig:
        answer = await rig.chat(stream=stream, **fields)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert client.queues == []


class RefusingClient(TalkingClient):
    async def control(self, name: str, **arguments: Any) -> Any:
        raise UserError("the JSON schema cannot be compiled: why")


TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        ("chat/completions", json_schema(schema=SCHEMA), "response_format.json_schema.schema"),
        ("completions", json_schema(schema=SCHEMA), "response_format.json_schema.schema"),
        (
            "chat/completions",
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "response_format.schema",
        ),
        ("chat/completions", {"guided_json": SCHEMA}, "guided_json"),
        (
            "chat/completions",
            {"tools": [TOOL], "tool_choice": "required"},
            "the parameters of a tool",
        ),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            "text.format.schema",
        ),
    ],
)
async def test_the_error_has_the_path_of_a_grammar_that_cannot_be_compiled(
    path: str, fields: dict[str, Any], place: str
) -> None:
    prompts = {
        "completions": {"prompt": "x"},
        "responses": {"input": "x"},
        "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }
    async with in_memory(RefusingClient()) as rig:
        answer = await rig.post(f"/v1/{path}", {**prompts[path], **fields})

    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{place}: the JSON schema cannot be compiled: why"


async def test_a_grammar_that_waits_too_long_gets_a_retry_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Busy(TalkingClient):
        async def control(self, name: str, **arguments: Any) -> Any:
            await asyncio.sleep(60)

    monkeypatch.setattr(job, "GRAMMAR_TIMEOUT_S", 0.05)
    async with in_memory(Busy()) as rig:
        answer = await rig.chat(**json_schema(schema=SCHEMA))

    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert "waited 0.05 s" in answer.json()["error"]["message"]


async def test_a_grammar_is_compiled_in_the_turn_of_its_key_or_address() -> None:
    client = CompilingClient()
    async with in_memory(client, api_keys=("a", "b")) as rig:
        for key in "aba":
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "x", "max_tokens": 1, "guided_regex": "a"}
            answer = await rig.post("/v1/completions", body, headers=headers)
            assert answer.status_code == 200, answer.text
    async with in_memory(client) as rig:
        await rig.chat(guided_regex="a")

    first, second, third, address = client.clients
    assert first == third != second and first
    assert address == "127.0.0.1"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_grammar_is_not_waited_for_when_its_client_has_left(path: str) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    class Busy(TalkingClient):
        async def control(self, name: str, **arguments: Any) -> Any:
            has_begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                has_ended.set()

    body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    async with on_port(Busy()) as rig:
        request = asyncio.ensure_future(rig.post(path, {**body, "guided_regex": "a"}))
        await asyncio.wait_for(has_begun.wait(), WAIT_S)
        request.cancel()
        await asyncio.wait_for(has_ended.wait(), WAIT_S)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
@settings(deadline=None)
def test_least_characters_never_exceeds_the_length_of_the_json(value: Any) -> None:
    written = json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    assert structured_output.least_characters(value) <= len(written)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"enum": [1] * 10**6}, "has at least 1000010 characters as JSON"),
        ({"description": "x" * 10**6}, "has at least 10000[0-9]+ characters as JSON"),
        ("[" * 10**6, "structured_outputs.json has 1000000 characters"),
    ],
    ids=["values", "text", "JSON in a text"],
)
def test_a_schema_that_is_too_long_is_refused_before_it_is_written_or_read(
    value: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output, "json", None)

    with pytest.raises(UserError, match=f"{words}, at most {structured_output.MAX_CHARACTERS} "):
        structured_output.grammar_spec({"json": value})


@pytest.mark.parametrize("name", ["guided_json", "json_schema", "structural_tag"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_a_schema_as_text_with_a_number_that_is_not_json_is_refused(
    name: str, number: str
) -> None:
    async with in_memory() as rig:
        refused = await rig.chat(**{name: f'{{"type": "integer", "minimum": {number}}}'})

        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, name)
        assert error["message"] == (
            f"{name} is a string that is not JSON: {number} is not a finite number"
        )


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"minimum": math.nan}}}, "its 'minimum' is nan, it must be a finite"),
        ({"enum": [1.0, -math.inf]}, "its 'enum' is -inf, it must be a finite number"),
        ({"enum": {1}}, "Object of type set is not JSON serializable"),
    ],
)
def test_a_value_of_a_schema_that_is_not_json_is_named(schema: object, words: str) -> None:
    with pytest.raises(UserError, match=f"^structured_outputs.json cannot be .* JSON: {words}"):
        structured_output.grammar_spec({"json": schema})
